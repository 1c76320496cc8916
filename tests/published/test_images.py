"""Training of a multimodal model and of a diffusion transformer, as their repositories state it, is predicted too fast.

Nothing is fitted to these. They are wall-clock times of scripts with their loaders (and, in DiT's, an average of all
FP32 weights after each step), so a prediction is below them; how far is held
here, so that nobody makes it worse unseen.
"""

from typing import Any

import pytest

from clustersim import Scenario, simulate

HOUR = 3600.0
# haotian-liu/LLaVA, README, "Pretrain": around 3.5 hours of LLaVA-v1.5-7B and 5.5 of the 13B on 8 A100 (80 GB) for
# 558,128 pairs of an image and a caption, 256 a step; language model and encoder are frozen
# (scripts/v1_5/pretrain.sh). A caption is some 40 tokens with its prompt, next to 576 of the image.
LLAVA_STEPS = 558_128 / 256
LLAVA_STEP = 3.5 * HOUR / LLAVA_STEPS
LLAVA: dict[str, Any] = {
    "model": {"preset": "llava-1.5-7b", "frozen": True},
    "cluster": {"name": "dgx-a100", "gpus": 8},
    "layout": {"data": "zero2"},
    "training": {
        "sequence": 624,
        "global_batch": 256,
        "microbatch": 32,
        "recompute": "full",
        "overheads": {"unpads_batches": True},  # unpad_input in llava/train/llama_flash_attn_monkey_patch.py
    },
    "framework": "deepspeed",
}
LLAVA_13B: dict[str, Any] = {
    **LLAVA,
    "model": {
        "language": {"preset": "llama2-13b", "frozen": True},
        "encoder": {"preset": "clip-vit-l-14-336", "frozen": True},
    },
}
# chuanyangjin/fast-DiT, README, "Improved Training Performance": 0.84 steps/s of DiT-XL/2 on one A100 with a batch of
# 128, gradient checkpoints, FP16 (torch.autocast of FP32 weights) and features extracted beforehand.
DIT_STEP = 1 / 0.84
DIT: dict[str, Any] = {
    "model": "dit-xl-2",
    "cluster": {"name": "dgx-a100", "gpus": 1},
    "training": {
        "global_batch": 128,
        "microbatch": 128,
        "precision": "fp16",
        "recompute": "full",
        "attention": "standard",
        "overheads": {"autocast": True},
    },
    "framework": "pytorch",
}


@pytest.mark.parametrize(
    ("mapping", "measured", "lowest"),
    [(LLAVA, LLAVA_STEP, -0.2), (LLAVA_13B, 5.5 * HOUR / LLAVA_STEPS, -0.08), (DIT, DIT_STEP, -0.05)],
    ids=["llava-1.5-7b", "llava-1.5-13b", "dit-xl-2"],
)
def test_steps_are_predicted_below_what_scripts_take(mapping: dict[str, Any], measured: float, lowest: float) -> None:
    """First predictions: 20 % and 8 % without the copies of padded batches, 27 % without autocast in FP32 below.

    LLaVA's hours are rounded to halves, so that the 7B's lacks 0.6 to 1.5 s a step and the 13B's 0.2 to 1.0 s: the
    same 0.6 to 1.0 s explain both, whatever the language model. What takes them is not known; a microbatch is padded to
    its longest caption (16 tokens more are 2 %), and start, logging and saving are in the hours.
    """
    error = simulate(Scenario.from_mapping(mapping)).step_time / measured - 1
    assert lowest < error < 0.05
