"""``python -m anabranch``: the same as the command ``anabranch``."""

from anabranch.cli import main

main()
