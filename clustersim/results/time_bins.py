"""Into how many equal bins is a step divided where rates over time are shown?"""

from typing import Final

DEFAULT_BIN_COUNT: Final = 400
