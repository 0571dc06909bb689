"""Python loads this first in all processes of a disturbed query: it lets their storage fail, if that is wanted."""

import os

# The name of the variable stands here again because most processes should load nothing more.
if os.environ.get("SOAK_STORAGE"):
    from soak import failingstorage

    failingstorage.install()
