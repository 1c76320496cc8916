"""How does a loss run that computes the logits itself, part by part, so that they never exist at once?

Four matmuls instead of three: nothing of the logits is saved, and backward computes them again.
CHUNKED_NLL (TRL, `trl/trainer/sft_trainer.py`, chunks of 256 tokens, each under an activation checkpoint) runs
PyTorch's loss of FP32 logits chunk by chunk; every chunk reads the whole output matrix, and autograd adds its
gradient of that matrix to the sum of the others, in the activation format. CUT_CROSS_ENTROPY (Wijmans et al.
2024, arXiv:2411.09009, algorithms 1 to 3) keeps logits on the chip in forward. Its backward, like Megatron-LM's
(megatron/core/fusions/linear_cross_entropy), writes the gradient of the logits of one split of the vocabulary at
a time; Apple's kernel also skips blocks whose gradient vanishes, which is not counted. It caps logits in
registers. FUSED_LINEAR (torchtitan) computes gradients in forward and nothing twice; its few large
chunks are timed as one. LIGER (linkedin/Liger-Kernel, ops/fused_linear_cross_entropy.py) does, too, in chunks of
the next power of two of tokens x hidden size / vocabulary, and the matmul of each chunk adds its gradient to the
output matrix's (since c9fc646f, 2026-07-01); releases up to 0.8.0 write it, copy it to FP32 and add the copy.
"""

import math
from dataclasses import replace
from itertools import chain
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel
from clustersim.model.linear import LinearLayer
from clustersim.model.operators import Operator
from clustersim.model.overheads import Accumulation
from clustersim.model.sharded_layer import RankContext, linear_operator
from clustersim.model.training import FusedKernel, LossImplementation

RECOMPUTING_LOSSES: Final = frozenset({LossImplementation.CHUNKED_NLL, LossImplementation.CUT_CROSS_ENTROPY})
"""Losses whose backward computes the logits again."""
_LIGER_LOSSES: Final = frozenset({LossImplementation.LIGER, LossImplementation.LIGER_FP32_SUM})
LOSSES_BY_PART: Final = RECOMPUTING_LOSSES | _LIGER_LOSSES
"""Losses whose parts are timed one by one."""
LOSSES_WITH_MATMUL: Final = LOSSES_BY_PART | {LossImplementation.FUSED_LINEAR}
"""Losses that run the output matrix themselves, for a part of the logits at a time."""
LOSS_CHUNKS: Final = 8
"""Chunks of a chunked loss (torchtune, CEWithChunkedOutputLoss, num_output_chunks; torchtitan, ChunkedCELoss)."""
CHUNK_TOKENS: Final = 256
"""Tokens of a chunk of `chunked_nll` (TRL, sft_trainer.py, `_CHUNKED_LM_HEAD_CHUNK_SIZE`)."""
VOCAB_SPLIT: Final = 3072
"""Vocabulary entries whose gradients exist at once (Megatron-LM, linear_cross_entropy, LCE_BWD_VOCAB_SPLIT_SIZE)."""


def chunk_tokens(loss: LossImplementation, tokens: int, *, hidden: int, vocab_rows: int) -> int:
    """Tokens of a chunk of a loss that is timed chunk by chunk."""
    if loss not in _LIGER_LOSSES:
        return min(tokens, CHUNK_TOKENS)
    share = math.ceil(tokens / math.ceil(vocab_rows / hidden))
    return min(tokens, 1 << (share - 1).bit_length())


def logit_share(loss: LossImplementation, tokens: int, *, hidden: int, vocab_rows: int) -> float:
    """The part of a rank's logits [tokens, vocab_rows] that exists at once."""
    match loss:
        case LossImplementation.CHUNKED | LossImplementation.FUSED_LINEAR:
            return 1 / LOSS_CHUNKS
        case LossImplementation.CHUNKED_NLL | LossImplementation.LIGER | LossImplementation.LIGER_FP32_SUM:
            return chunk_tokens(loss, tokens, hidden=hidden, vocab_rows=vocab_rows) / tokens
        case LossImplementation.CUT_CROSS_ENTROPY:
            return min(1.0, VOCAB_SPLIT / vocab_rows)
    return 1.0


def loss_operators_by_part(rank: RankContext, logits: LinearLayer) -> list[Operator]:
    """The output matrix with a loss of `LOSSES_BY_PART`.

    logits: the linear layer of all tokens and of this rank's part of the vocabulary.
    """
    operator = linear_operator(rank, logits, rank.residual_bytes)
    if rank.training.loss is LossImplementation.CUT_CROSS_ENTROPY:
        return [_cut_operator(rank, operator)]
    sizes = _chunk_sizes(rank, logits)
    chunks = [_chunk_kernels(rank, replace(logits, tokens=tokens)) for tokens in sizes]
    forward, input_gradient, weight_gradients = (tuple(chain(*kernels)) for kernels in zip(*chunks, strict=True))
    sums = _matrix_sums(rank, logits, len(sizes))
    return [
        replace(
            operator,
            forward=forward,
            input_gradient=input_gradient,
            weight_gradient=(*weight_gradients, *sums, *_accumulation(rank, logits)),
        )
    ]


def _chunk_sizes(rank: RankContext, logits: LinearLayer) -> list[int]:
    size = chunk_tokens(rank.training.loss, logits.tokens, hidden=logits.inputs, vocab_rows=logits.outputs)
    full, remainder = divmod(logits.tokens, size)
    return [size] * full + [remainder] * bool(remainder)


def _chunk_kernels(rank: RankContext, chunk: LinearLayer) -> tuple[tuple[Kernel, ...], ...]:
    """Kernels of a chunk: forward, the input gradient (behind the same again if recomputed), the weight gradient."""
    recipe, dtype = rank.training.recipe, rank.dtype
    softcap = memory_bound.softcap_spec(fused=rank.training.fuses(FusedKernel.ACTIVATION))
    specs = {"head.softcap": softcap} if rank.model.final_logit_softcapping else {}
    specs["head.loss"] = memory_bound.loss_spec(rank.training.loss)
    if rank.training.z_loss and (z_loss := memory_bound.z_loss_spec(rank.training.loss)) is not None:
        specs["head.z_loss"] = z_loss
    shapes = {name: spec.shape_for(chunk.tokens, chunk.outputs) for name, spec in specs.items()}
    pointwise = tuple(spec.forward_kernel(name, dtype, shapes[name]) for name, spec in specs.items())
    gradients = (spec.backward_kernels(name, dtype, shapes[name]) for name, spec in reversed(specs.items()))
    forward = (*chunk.forward(recipe), *pointwise)
    recomputed = tuple(replace(kernel, name=f"{kernel.name}.recompute") for kernel in forward)
    again = recomputed if rank.training.loss in RECOMPUTING_LOSSES else ()
    backward = (*again, *chain(*gradients), *chunk.input_gradient(recipe))
    return forward, backward, (_chunk_weight_gradient(rank, chunk),)


def _chunk_weight_gradient(rank: RankContext, chunk: LinearLayer) -> Kernel:
    """The output matrix's gradient of a chunk; Liger's matmul reads the sum that it adds to."""
    gradient = chunk.weight_gradient(rank.training.recipe, Accumulation.COPIED)[0]
    sum_bytes = chunk.parameter_count * rank.dtype.bytes if rank.training.loss is LossImplementation.LIGER else 0.0
    return replace(gradient, bytes=gradient.bytes + sum_bytes)


def _matrix_sums(rank: RankContext, logits: LinearLayer, chunks: int) -> tuple[Kernel, ...]:
    """What adds the chunks' gradients of the output matrix, in the activation format."""
    name, size = f"{logits.name}.chunk_sum", (logits.outputs, logits.inputs)
    match rank.training.loss:
        case LossImplementation.LIGER:
            return ()
        case LossImplementation.LIGER_FP32_SUM:
            copy = memory_bound.convert_kernel(f"{name}.convert", rank.dtype, DType.FP32, size)
            return chunks * (copy, memory_bound.add_kernel(name, size, gradient=DType.FP32, accumulator=rank.dtype))
    return (chunks - 1) * (memory_bound.add_kernel(name, size, gradient=rank.dtype, accumulator=rank.dtype),)


def _accumulation(rank: RankContext, logits: LinearLayer) -> tuple[Kernel, ...]:
    """What adds the output matrix's gradient to those of other microbatches, and the gradient of its bias.

    No matmul epilogue does so, since the gradient is a sum over chunks.
    """
    accumulation = rank.training.accumulation
    unfused = Accumulation.ADDED if accumulation is Accumulation.FUSED else accumulation
    return logits.weight_gradient(rank.training.recipe, unfused)[1:]


def _cut_operator(rank: RankContext, operator: Operator) -> Operator:
    """Forward writes no logits; backward computes them again and writes their gradient in their place."""
    *casts, matmul = operator.forward
    logit_bytes = rank.shard.tokens * rank.vocab_rows * rank.dtype.bytes
    forward = (*casts, replace(matmul, bytes=matmul.bytes - logit_bytes))
    recomputed = replace(matmul, name=f"{matmul.name}.recompute")
    return replace(operator, forward=forward, input_gradient=(recomputed, *operator.input_gradient))
