"""Runs families of histories, all of them or one that an environment variable names, and tells what happened."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simulated import families as families
from simulated.application import Application
from simulated.history import History, draw_history
from simulated.redis import draw_shared

#: The share of all histories that is run. More than 1 runs more than 10,000.
SCALE = float(os.environ.get("ANABRANCH_SIMULATION_SCALE", "1"))
ONLY = os.environ.get("ANABRANCH_SIMULATION_SEED")

Draw = Callable[[int], History]

#: How histories are drawn, and how many of them; 10,000 in all. Nearly half have faults of any kind; those of the other
#: families take longer, because each leads to what seldom happens by chance.
EPOCHS: dict[str, tuple[Draw, int]] = {
    "any": (draw_history, 1500),
    "return": (families.draw_return, 700),
    "rerun": (families.draw_rerun, 700),
    "late": (families.draw_late, 600),
    "storage": (families.draw_storage_trouble, 700),
    "tables": (families.draw_tables, 250),
    "timed": (families.draw_timed, 200),
    "clocks": (families.draw_clocks, 200),
    "broken": (families.draw_broken, 300),
}
CHANGES: dict[str, tuple[Draw, int]] = {
    # As "any", from other seeds: two processes play the families, and this takes each of them as long.
    "more": (lambda seed: draw_history(1_000_000 + seed), 3200),
    "losses": (families.draw_losses, 350),
    "upkeep": (families.draw_upkeep, 250),
    "reads": (families.draw_reads, 150),
    "moves": (families.draw_moves, 300),
    "slow": (families.draw_slow, 100),
    "chains": (families.draw_chains, 120),
    "strays": (families.draw_strays, 50),
    "volatile": (families.draw_volatile, 150),
    "savepoints": (families.draw_savepoints, 80),
    "real": (families.draw_real, 30),
    "shared": (draw_shared, 70),
}
FAMILIES = EPOCHS | CHANGES


def seeds(family: str) -> range:
    if ONLY is None:
        return range(round(SCALE * FAMILIES[family][1]))
    chosen, _, seed = ONLY.rpartition(":")
    return range(int(seed), int(seed) + 1) if chosen == family else range(0)


def run_family(family: str) -> Counter[str]:
    """Runs all histories of a family; what happened in them, how often."""
    happened: Counter[str] = Counter()
    for seed in seeds(family):
        history = FAMILIES[family][0](seed)
        application = Application(history)
        try:
            application.run()
        except Exception as error:
            error.add_note(f"{history}\nRun it alone with ANABRANCH_SIMULATION_SEED={family}:{seed}.")
            raise
        happened += application.world.seen
    return happened


@contextmanager
def quick_histories() -> Iterator[None]:
    """Saves a fifth of the time: histories leave many small cycles behind, and log what nobody reads."""
    known = gc.get_threshold()
    gc.set_threshold(200_000)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.set_threshold(*known)
