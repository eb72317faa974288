"""Bad input ends in one line that names the thing and the remedy."""

import pytest

from quantkit.common.errors import QuantkitError


def refused(line):
    """What a `with` holds is refused, and this pattern is in the line."""
    return pytest.raises(QuantkitError, match=line)
