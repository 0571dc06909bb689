"""What an error says: the words that matter, in their order, however the rest of the sentence is put."""

from __future__ import annotations


def says(text: str, outline: str) -> bool:
    """Whether the text begins with the first part of the outline and has the others after it; "…" is any words."""
    first, *others = [part.strip() for part in outline.split("…")]
    if not text.startswith(first):
        return False
    position = len(first)
    for part in others:
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True
