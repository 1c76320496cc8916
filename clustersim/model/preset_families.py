"""Published dense models of further families, with the sources of their dimensions."""

from typing import Final

from clustersim.model.preset_builder import config_dimensions, preset_from_config

FAMILY_PRESETS: Final = (
    preset_from_config(
        "mistral-7b-v0.1",
        "mistral",
        "Jiang et al. 2023, arXiv:2310.06825, Table 1; mistralai/Mistral-7B-v0.1",
        config_dimensions(32, 4096, 14336, 32, 8, 32000, 32768) | {"sliding_window": 4096},
    ),
    preset_from_config(
        "gemma2-9b",
        "gemma2",
        "Gemma 2, arXiv:2408.00118, Table 1; google/gemma-2-9b",
        config_dimensions(42, 3584, 14336, 16, 8, 256000, 8192) | {"sliding_window": 4096},
    ),
    preset_from_config(
        "gemma3-27b",
        "gemma3_text",
        "Gemma 3, arXiv:2503.19786, section 2; the text_config of google/gemma-3-27b-pt",
        config_dimensions(62, 5376, 21504, 32, 16, 262208, 131072) | {"head_dim": 128, "sliding_window": 1024},
    ),
    preset_from_config(
        "qwen3-8b",
        "qwen3",
        "Qwen3, arXiv:2505.09388, Table 1; Qwen/Qwen3-8B",
        config_dimensions(36, 4096, 12288, 32, 8, 151936, 40960),
    ),
    preset_from_config(
        "olmo2-7b",
        "olmo2",
        "OLMo 2, arXiv:2501.00656; allenai/OLMo-2-1124-7B",
        config_dimensions(32, 4096, 11008, 32, 32, 100352, 4096),
    ),
    preset_from_config(
        "smollm3-3b", "smollm3", "HuggingFaceTB/SmolLM3-3B", config_dimensions(36, 2048, 11008, 16, 4, 128256, 65536)
    ),
    preset_from_config(
        "falcon-7b",
        "falcon",
        "Almazrouei et al. 2023, arXiv:2311.16867; tiiuae/falcon-7b",
        {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024},
    ),
    preset_from_config(
        "bloom-176b",
        "bloom",
        "BigScience 2022, arXiv:2211.05100; bigscience/bloom",
        {"n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880},
    ),
)
