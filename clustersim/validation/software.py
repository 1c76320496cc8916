"""What does a run's software do that its publication does not say?

The `framework` column names the software; its habits are defaults of its code at that time, the same for every run.
"""

from dataclasses import dataclass
from typing import Any, Final

from clustersim.validation.cases import Case

_MEGATRON_BUCKET: Final = "160 MB"  # 40 M parameters in fp32 (DistributedDataParallelConfig.bucket_size)


@dataclass(frozen=True, slots=True)
class Software:
    """One framework at one time. wanted: part of the `framework` cell; until: last year of this generation.

    pipeline_overlap: sends between stages run beside compute; wide_gradients: bf16 runs keep and reduce gradients in
    fp32; attention: where a row states none; bucket: of gradients that are not sharded.
    """

    wanted: str
    until: int = 9999
    pipeline_overlap: bool = True
    wide_gradients: bool = True
    attention: str = "flash"
    loss: str = "vocab_parallel"
    biased: bool = False
    bucket: str | None = None

    def model(self, case: Case) -> dict[str, Any]:
        """What the model's layers are made of."""
        llama = case.text("family") == "llama" or case.text("mlp") == "swiglu"
        gpt = self.biased and not llama and "squared-ReLU" not in case.text("notes")
        learned = gpt or "learned position" in case.text("notes")
        return {
            "norm": "rmsnorm" if llama else "layernorm",
            "positions": "learned" if learned else "rotary",
            "linear_bias": gpt,
            "qkv_bias": gpt,
            "dropout": gpt,  # 0.1 in Megatron's and NeMo's GPT recipes
        }

    def data(self, case: Case) -> dict[str, Any]:
        """The strategy of data parallelism."""
        stage = int(case.text("zero_stage") or 0)
        overlap = case.is_yes("overlap_grad_reduce")
        if stage == 3:
            return {"fsdp": {"overlap": overlap}}
        if stage:
            return {"zero": {"stage": stage, "overlap": overlap}}
        return {"ddp": {"overlap": overlap, **({"bucket": self.bucket} if self.bucket else {})}}

    def overlaps_tensors(self, case: Case) -> bool:
        """Whether tensor-parallel collectives are pipelined with their matmuls."""
        notes = case.text("notes")
        return "tensor-parallel communication overlap on" in notes or "asyncTP" in notes

    def gradients(self, case: Case) -> str:
        """The format in which gradients are kept and reduced."""
        compute = case.text("precision")
        return "fp32" if compute == "bf16" and self.wide_gradients else compute


# The first that matches; Megatron-LM keeps fp16 gradients of fp16 runs, fp32 of bf16 runs.
SOFTWARE: Final = (
    Software("composer", wide_gradients=False, loss="fused"),
    Software("torchtitan", loss="torch"),
    Software("nemo", biased=True, bucket=_MEGATRON_BUCKET),
    Software("megatron-bridge", bucket=_MEGATRON_BUCKET),
    Software(
        "megatron", until=2023, biased=True, pipeline_overlap=False, attention="standard", bucket=_MEGATRON_BUCKET
    ),
    Software("megatron", biased=True, bucket=_MEGATRON_BUCKET),
    Software(""),
)


def software_of(case: Case) -> Software:
    """The software of a run."""
    name = case.text("framework").lower()
    year = int(case.text("year")) if case.text("year").isdigit() else 9999
    return next(each for each in SOFTWARE if each.wanted in name and year <= each.until)
