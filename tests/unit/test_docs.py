"""What the documentation says about settings and examples is what the code has."""

import re
from pathlib import Path

from anabranch.core.settings import Settings

ROOT = Path(__file__).parents[2]


def test_every_setting_is_documented_with_its_default_and_meaning() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(anabranch\.\w+)` \|\s*(.*?)\s*\|\s*(.*?)\s*\|$", text, re.MULTILINE)
    shown = [(name, _text(default), meaning) for name, default, meaning in Settings.describe()]
    assert rows == shown


def test_links_in_the_documentation_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def _text(default: object) -> str:
    if default == () or default == "":
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)
