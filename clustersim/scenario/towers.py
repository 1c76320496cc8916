"""Which towers has a scenario's model: a language model alone, or an encoder of images and a projector before it?

The language model's keys stand in `model` itself or in `model.language`. A preset may have all three; sections next to
it change them. What is frozen decides which gradients exist (`model.gradient_flow`): they pass through a frozen
language model to a projector or an encoder that is trained, and end where nothing before is trained.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.gradient_flow import GradientFlow, ModelGradients
from clustersim.model.model_ends import Projector
from clustersim.model.transformer import Encoder, TransformerModel
from clustersim.scenario.config.model import EncoderConfig, LanguageConfig, ProjectorConfig, TowersConfig
from clustersim.scenario.file_cache import ReadCache
from clustersim.scenario.model import change_model, read_model, with_input_size

_TRAINED: Final = GradientFlow.TRAINED
_NO_PROJECTOR: Final = ProjectorConfig()


@dataclass(frozen=True, slots=True)
class _Frozen:
    """Which towers are frozen."""

    encoder: bool
    projector: bool
    language: bool

    @property
    def encoder_gradients(self) -> ModelGradients:
        """Gradients of an encoder, whose head is the projector."""
        flow = GradientFlow.NONE if self.encoder else _TRAINED
        if not self.projector:
            return ModelGradients(flow, flow, _TRAINED)
        return ModelGradients(flow, flow, GradientFlow.NONE if self.encoder else GradientFlow.PASSES)

    @property
    def language_gradients(self) -> ModelGradients:
        """Gradients of the language model; raise InputError if nothing is trained."""
        if not self.language:
            return ModelGradients()
        if self.encoder and self.projector:
            raise InputError("frozen: true of all its towers, so nothing is trained; leave one of them out")
        return ModelGradients(GradientFlow.NONE, GradientFlow.PASSES, GradientFlow.PASSES)


def read_towers(config: TowersConfig, base_dir: Path, sequence: int, read_cache: ReadCache) -> TransformerModel:
    """The model that a section names or describes, with its encoder, if it has one."""
    section = _language_section(config)
    model = read_model(section, base_dir, sequence, read_cache)
    encoder = _read_encoder(config, model.encoder, base_dir, read_cache)
    if encoder is None:
        return _without_encoder(model, config, section)
    if not model.has_vocabulary_loss:
        raise InputError(f"encoder: {model.name} reads images itself; give the preset of a language model")
    frozen = _frozen_towers(config, section, model)
    tower = replace(encoder.model, gradients=frozen.encoder_gradients, label="encoder")
    tower = replace(tower, head=_projector(config.projector or _NO_PROJECTOR, model, encoder))
    return replace(model, encoder=replace(encoder, model=tower), gradients=frozen.language_gradients)


def _language_section(config: TowersConfig) -> LanguageConfig:
    """The section with the language model's keys; raise InputError where they are in two places."""
    if config.language is None:
        return config
    own_keys = config.model_fields_set - {"encoder", "projector", "language"}
    if own_keys:
        raise InputError(f"{min(own_keys)}: next to language, whose key it would be; write it there")
    return config.language


def _without_encoder(model: TransformerModel, config: TowersConfig, section: LanguageConfig) -> TransformerModel:
    """The model alone; raise InputError for keys that need an encoder."""
    if config.projector is not None and config.encoder is None:
        raise InputError("projector: there is no encoder that it belongs to; give encoder, or leave it out")
    if section.frozen:
        raise InputError("frozen: true, but there is no encoder or projector to train; leave it out, or give encoder")
    return replace(model, encoder=None, gradients=ModelGradients())


def _read_encoder(
    config: TowersConfig, preset: Encoder | None, base_dir: Path, read_cache: ReadCache
) -> Encoder | None:
    """The encoder of a section, or of the preset with the section's changes; None without one, or without layers."""
    section = config.encoder
    if section is None:
        return preset
    if section.layers == 0:
        return None
    if section.preset is None and section.path is None:
        if preset is None:
            raise InputError(f"encoder: names no preset, which it needs; write such as {EncoderConfig.example}")
        encoder = replace(preset, model=change_model(preset.model, section))
        recomputed = encoder.recomputed if section.recompute is None else section.recompute
        return _with_images(replace(encoder, recomputed=recomputed), section)
    model = read_model(section, base_dir, 1, read_cache)
    if model.patches is None:
        raise InputError(f"encoder: {model.name} reads tokens, not images; such as clip-vit-l-14-336")
    encoder = Encoder(model, 1.0 if preset is None else preset.samples, section.recompute is not False)
    return _with_images(encoder, section)


def _with_images(encoder: Encoder, section: EncoderConfig) -> Encoder:
    """The encoder with the section's images of a sequence."""
    if section.images is None:
        return encoder
    tokens = tuple(with_input_size(encoder.model, size).sample_tokens for size in section.images.sizes or ())
    return replace(encoder, samples=section.images.expected, counts=section.images.image_counts(tokens))


def _projector(section: ProjectorConfig, model: TransformerModel, encoder: Encoder) -> Projector:
    """The projector between two towers; raise InputError where it does not end in the language model's width."""
    head, patches = encoder.model.head, encoder.model.patches
    if isinstance(head, Projector):
        projector = head
    else:
        drops = 0 if patches is None else patches.class_tokens
        projector = Projector((model.hidden, model.hidden), drops=drops)
    widths = projector.widths if section.widths is None else tuple(section.widths)
    if widths[-1] != model.hidden:
        raise InputError(
            f"projector.widths: end in {widths[-1]}, but {model.name} is {model.hidden} wide; "
            f"write such as [{model.hidden}, {model.hidden}]"
        )
    return replace(projector, widths=widths, merge=section.merge or projector.merge)


def _frozen_towers(config: TowersConfig, section: LanguageConfig, model: TransformerModel) -> _Frozen:
    """Which towers are frozen: as the file says, or as in the preset."""
    preset = ModelGradients() if model.encoder is None else model.encoder.model.gradients
    encoder = None if config.encoder is None else config.encoder.frozen
    projector = None if config.projector is None else config.projector.frozen
    return _Frozen(
        preset.layers is not _TRAINED if encoder is None else encoder,
        preset.head is not _TRAINED if projector is None else projector,
        model.gradients.layers is not _TRAINED if section.frozen is None else section.frozen,
    )
