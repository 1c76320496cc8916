"""Do an encoder of images and its projector fit the layout and the training? Models of images alone, too.

Each check reports in one sentence what conflicts and what would fit.
"""

from collections.abc import Iterator

from clustersim.model.model_ends import NoHead
from clustersim.model.offload import NO_OFFLOAD
from clustersim.model.training import AttentionBackend
from clustersim.model.transformer import Encoder, TransformerModel
from clustersim.parallel.layer_partition import BehindEncoder
from clustersim.parallel.mesh import DENSE_AXIS_NAMES
from clustersim.scenario.nearest_values import divisors
from clustersim.scenario.reliability import ElasticPolicy
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.scenario.validation_rules.remedies import Problem, Remedy, SizeProblem


def check_images(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that nothing of a training run is about sequences of text, where a model reads images."""
    training, layout, model = scenario.training, scenario.layout, scenario.model
    if model.patches is None:
        return
    conflicts = {"training.documents": training.documents is not None, "training.lora": training.lora is not None}
    yield from _conflicts(model, conflicts)
    if isinstance(model.head, NoHead):
        yield (
            f"model: {model.name} ends in features, of which no loss is known; give it as model.encoder in front of a "
            "language model, or a model with a head, such as vit-l-16"
        )
    if layout.data.is_single_process:
        yield f"layout.data: torch_data_parallel gathers logits, of which {model.name} has none; ddp fits"


def check_encoder(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that an encoder fits the training, and that tensor parallelism divides its sizes."""
    training, layout, model = scenario.training, scenario.layout, scenario.model
    encoder = model.encoder
    if encoder is None:
        return
    conflicts = {
        "training.lora": training.lora is not None,
        "training.reference_model": training.reference_model,
        "layout.overlap_moe_expert_parallel_comm": layout.overlap_moe_expert_parallel_comm,
        "layout.data: torch_data_parallel": layout.data.is_single_process,
        "layout.data: deepspeed_zero3": layout.data.gathers_single_parameters,
        f"training.attention: {training.attention.value}, whose kernels are of one length, with sizes that differ": (
            len(encoder.image_tokens) > 1 and training.attention is AttentionBackend.STANDARD
        ),
        f"schedule: {scenario.schedule.name}, which splits backward,": scenario.schedule.takes_pass_costs
        and model.gradients.has_frozen,
    }
    yield from _conflicts(model, conflicts)
    yield from _check_image_counts(scenario, encoder)
    tp, key = (layout.tp, "layout.tp") if layout.encoder_tp is None else (layout.encoder_tp, "layout.encoder_tp")
    yield from _check_encoder_degrees(encoder.model, key, tp)
    widths = encoder.projector.widths[:-1]
    for width in (width for width in widths if width % tp):
        yield f"{key}: {tp} does not divide the projector's width {width} of {model.name}"


def check_encoder_layout(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that an encoder with degrees of its own exists, and fits the layout."""
    layout, model, training = scenario.layout, scenario.model, scenario.training
    tp, dp = layout.encoder_tp, layout.encoder_dp
    key, degree = ("layout.encoder_tp", tp) if dp is None else ("layout.encoder_dp", dp)
    if degree is None:
        return
    if model.encoder is None:
        yield f"{key}: {degree}, but {model.name} has no encoder; leave it out, or give one"
        return
    if dp is None and tp is not None and layout.tp % tp:
        yield Problem(
            f"layout.encoder_tp: {tp} does not divide tp {layout.tp}, over whose ranks replicas of the encoder lie",
            Remedy.nearest("layout.encoder_tp", tp, divisors(layout.tp)),
        )
    conflicts = {
        f"layout.order: {list(layout.order)}": dp is None and layout.order != DENSE_AXIS_NAMES,
        f"layout.data over {layout.data.shard_size} of the ranks that hold the same weights": layout.is_hybrid_sharded,
        f"schedule: {scenario.schedule.name}, which is bidirectional,": layout.mirrored,
        "training.optimizer of matrices": training.orthogonalizes_dense,
        "training.precision with matrices in formats of their own": training.recipe.has_matrix_formats,
    }
    if dp is not None:
        conflicts |= {
            f"schedule: {scenario.schedule.name}, whose ranks end one after the other,": (
                scenario.schedule.ends_staggered
            ),
            "training.offload": training.offload != NO_OFFLOAD,
            "diloco": scenario.diloco is not None,
            "reliability.elastic": scenario.reliability.elastic is not ElasticPolicy.WAIT,
        }
    for setting in (name for name, is_set in conflicts.items() if is_set and layout.has_encoder_mesh):
        yield f"{setting} with {key} is not modelled; leave one of them out"


def check_encoder_ranks(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that an encoder with GPUs of its own has a stage of its own, and that theirs and the model's are all."""
    layout, gpus = scenario.layout, scenario.cluster.gpu_count
    dp, tp = layout.encoder_dp, layout.effective_encoder_tp
    if dp is None or scenario.model.encoder is None:
        return
    if not isinstance(layout.layers_per_stage, BehindEncoder):
        yield SizeProblem(
            f"layout.encoder_dp: {dp}, but the encoder has the first stage's ranks, of which there are as many as of "
            "others",
            Remedy("layout.encoder_placement", (("own_stage",),)),
        )
    elif layout.pp > 1 and layout.world_size != gpus:
        counts = range(1, gpus // tp + 1)
        fitting = (count for count in counts if (left := gpus - tp * count) > 0 and left % layout.replica_ranks == 0)
        yield SizeProblem(
            f"layout.encoder_dp: encoder_tp {tp} x encoder_dp {dp} and tp {layout.tp} x cp {layout.cp} x dp {layout.dp}"
            f" x {layout.pp - 1} other pipeline ranks = {layout.world_size} GPUs, but the cluster has {gpus}",
            Remedy.nearest("layout.encoder_dp", dp, fitting),
            Remedy("cluster.gpus", ((layout.world_size,),)),
        )


def check_encoder_placement(scenario: ResolvedScenario) -> Iterator[str]:
    """Check that an encoder with a stage of its own exists, and leaves stages for the model, one on each rank."""
    layout, model = scenario.layout, scenario.model
    if not isinstance(layout.layers_per_stage, BehindEncoder):
        return
    if model.encoder is None:
        yield f"layout.encoder_placement: own_stage, but {model.name} has no encoder; leave it out, or give one"
    elif layout.pp == 1:
        yield SizeProblem(
            f"layout.encoder_placement: own_stage takes a pipeline rank from pp 1, so {model.name} has none",
            Remedy("layout.pp", ((2,),)),
            Remedy("layout.encoder_placement", (("first_stage",),)),
        )
    elif scenario.placement.max_chunks > 1:
        yield (
            f"layout.encoder_placement: own_stage, but with schedule {scenario.schedule.name} the encoder's rank has "
            "stages of the model, too; write first_stage, or a schedule of one stage a rank, such as 1f1b"
        )


def _conflicts(model: TransformerModel, conflicts: dict[str, bool]) -> Iterator[str]:
    for setting in (name for name, is_set in conflicts.items() if is_set):
        yield f"{setting} with the images of {model.name} is not modelled; leave it out"


def _check_image_counts(scenario: ResolvedScenario, encoder: Encoder) -> Iterator[str]:
    """A microbatch has whole images, and their tokens fit into its sequences."""
    microbatch, sequence = scenario.training.microbatch, scenario.training.sequence
    images = microbatch * encoder.samples
    if encoder.counts is None and images != round(images):
        yield (
            f"model.encoder.images: {encoder.samples:g} in each of {microbatch} sequences of a microbatch are "
            f"{images:g} images; give a microbatch that makes them whole"
        )
    largest = encoder.samples if encoder.counts is None else max(1, encoder.samples, *encoder.counts.counts)
    tokens = largest * encoder.projector.projected_tokens(max(encoder.image_tokens))
    if tokens > sequence:
        yield (
            f"training.sequence: {sequence} tokens hold no {tokens:,.0f} of images; give longer "
            "ones, or fewer or smaller images (model.encoder.images, model.encoder.input_size)"
        )


def _check_encoder_degrees(model: TransformerModel, key: str, tp: int) -> Iterator[str]:
    """Tensor parallelism divides the encoder's heads and MLPs."""
    sizes = {f"heads {attention.heads}": attention.heads for attention in model.distinct_attentions}
    sizes |= {f"ffn {mlp.ffn}": mlp.ffn for mlp in model.distinct_dense_mlps}
    for label, size in sizes.items():
        if size % tp:
            yield Problem(
                f"{key}: {tp} does not divide {label} of the encoder {model.name}",
                Remedy.nearest(key, tp, divisors(size)),
            )
