"""The pools that page titles and user names are taken from."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pyarrow as pa

_QUALITIES = (
    "Amber",
    "Ancient",
    "Blue",
    "Broad",
    "Calm",
    "Clear",
    "Coastal",
    "Cold",
    "Copper",
    "Crooked",
    "Deep",
    "Distant",
    "Eastern",
    "Fallen",
    "Far",
    "Forgotten",
    "Golden",
    "Great",
    "Green",
    "Grey",
    "Hidden",
    "High",
    "Hollow",
    "Inland",
    "Iron",
    "Little",
    "Lone",
    "Long",
    "Lost",
    "Lower",
    "Misty",
    "Narrow",
    "New",
    "Northern",
    "Old",
    "Open",
    "Pale",
    "Quiet",
    "Red",
    "Royal",
    "Silent",
    "Silver",
    "Southern",
    "Stony",
    "Tall",
    "Upper",
    "Western",
    "White",
)
_THINGS = (
    "Abbey",
    "Bay",
    "Bridge",
    "Brook",
    "Canal",
    "Castle",
    "Channel",
    "Chapel",
    "Cliff",
    "Creek",
    "Delta",
    "Falls",
    "Ferry",
    "Field",
    "Forest",
    "Garden",
    "Glacier",
    "Harbour",
    "Heath",
    "Hill",
    "Island",
    "Lake",
    "Light",
    "Marsh",
    "Meadow",
    "Mill",
    "Moor",
    "Mountain",
    "Museum",
    "Oak",
    "Orchard",
    "Otter",
    "Park",
    "Pass",
    "Plain",
    "Pond",
    "Quarry",
    "Railway",
    "Ridge",
    "River",
    "Road",
    "Station",
    "Stone",
    "Tower",
    "Valley",
    "Village",
    "Wharf",
    "Wood",
)
_SUFFIXES = (
    "",
    " (album)",
    " (film)",
    " (disambiguation)",
    " County",
    " District",
    " School",
    " Railway Company",
    " in 1914",
    " in 1968",
    " and its history",
    " Cup 2012",
    " (novel)",
    " Football Club",
    " Bridge",
    " Line",
)
_ACCOUNTS_PER_NAME = 9


@lru_cache(maxsize=1)
def titles() -> pa.StringArray:
    """The titles of pages."""
    return pa.array([f"{q} {t}{s}" for q, t, s in product(_QUALITIES, _THINGS, _SUFFIXES)], pa.string())


@lru_cache(maxsize=1)
def users() -> tuple[pa.StringArray, int]:
    """The names of people, then those of bots, and how many are people."""
    names = [f"{q}{t}" for q, t in product(_QUALITIES, _THINGS)]
    people = [f"{name}{number}" for name in names for number in range(1, _ACCOUNTS_PER_NAME + 1)]
    bots = [f"{name}Bot" for name in names[::10]]
    return pa.array(people + bots, pa.string()), len(people)
