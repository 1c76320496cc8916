"""What may a scenario file say about MLPs that run on tiles of the sequence?

tiled_mlp: true                                  # DeepSpeed, Liger: tiles of as many tokens as the model is wide
tiled_mlp: {tokens: 16384, recompute: false}
"""

from typing import ClassVar

from clustersim.common.errors import format_value
from clustersim.model.training import TiledMlp
from clustersim.scenario.config_reader import ConfigModel, TokenCount, config_error


class TiledMlpConfig(ConfigModel):
    """`training.tiled_mlp`: dense MLPs run on one tile of the sequence after the other; true: with all defaults."""

    shorthand_key: ClassVar[str | None] = "tokens"
    example: ClassVar[str] = "true or {tokens: 16384, recompute: false}"
    tokens: TokenCount | None = None
    """of each sequence in a tile; left out: as many as the model is wide, as of DeepSpeed and Liger"""
    recompute: bool = True
    """a tile runs again before its backward, so that the MLP saves its input alone; false: forward loops over tiles"""

    def tiling(self) -> TiledMlp:
        """The tiles as the simulator represents them."""
        return TiledMlp(self.tokens, self.recompute)


def tiling_from_switch(value: object) -> object:
    """All defaults of `true`, nothing of `false` and `none`; any other word is refused."""
    if value is True:
        return {}
    if isinstance(value, str) and value != "none":
        raise config_error(f"{format_value(value)} is neither true nor false; write {TiledMlpConfig.example}")
    return None if value is False or value == "none" else value
