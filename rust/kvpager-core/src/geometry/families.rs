//! What a config leaves to its model class: refusals, and the few class defaults that released files rely on.

use super::fields::Fields;
use crate::Result;

/// Model types with recurrent or convolutional state beside (or instead of) K and V.
const STATE_SPACE: &[&str] = &[
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "minimax_text_01",
    "nemotron_h",
    "phi4flash",
    "plamo2",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "xlstm",
    "zamba",
    "zamba2",
];

/// Fields that only such models have.
const STATE_SPACE_FIELDS: &[&str] = &[
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "mamba_num_heads",
    "mamba_d_ssm",
    "lru_width",
    "linear_num_key_heads",
    "linear_attn_config",
    "hybrid_override_pattern",
    "attn_layer_period",
    "conv_L_cache",
    "full_attention_interval",
];

/// Model types that never decode.
const ENCODERS: &[&str] = &[
    "albert",
    "bert",
    "camembert",
    "clip",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "siglip",
    "vit",
    "xlm-roberta",
];

/// Fields whose cache this library does not size, and why.
const UNSIZED_FIELDS: &[(&str, &str)] = &[
    ("cross_attention_layers", "cross attention keeps K and V of the image, which no token count gives"),
    ("index_topk", "the sparse indexer keeps keys of its own beside the latent"),
    ("compress_ratios", "compressed attention keeps a different share of the tokens in each layer"),
];

/// Refuses what cannot be sized.
pub(super) fn refuse_unsized(fields: &Fields<'_>, model_type: &str, has_pattern: bool) -> Result<()> {
    if fields.flag("is_encoder_decoder")? == Some(true) {
        return Err(fields.fault("is_encoder_decoder", "cross attention over an encoder is not sized"));
    }
    if ENCODERS.contains(&model_type) {
        return Err(fields.fault("model_type", format!("{model_type:?} is an encoder: it keeps no KV cache")));
    }
    for &(name, reason) in UNSIZED_FIELDS {
        let used =
            fields.get(name).is_some_and(|value| value.as_array().is_none_or(|items| !items.is_empty()));
        if used {
            return Err(fields.fault(name, reason));
        }
    }
    // A hybrid that lists its layers is judged by that list; see `layers`.
    if has_pattern {
        return Ok(());
    }
    let why = "layers with recurrent state are not sized: their memory is per request, not per token";
    if STATE_SPACE.contains(&model_type) {
        return Err(fields.fault("model_type", format!("{model_type:?}: {why}")));
    }
    match STATE_SPACE_FIELDS.iter().find(|name| fields.get(name).is_some()) {
        Some(name) => Err(fields.fault(name, why)),
        None => Ok(()),
    }
}

/// The family without its wrapper: `gemma3_text` and `gemma3` are one.
pub(super) fn family(model_type: &str) -> &str {
    model_type.strip_suffix("_text").unwrap_or(model_type)
}

/// `head_dim` of classes that do not derive it from the width.
pub(super) fn default_head_dim(model_type: &str) -> Option<u64> {
    match family(model_type) {
        "gemma" | "gemma2" | "gemma3" | "gemma3n" | "gemma4" => Some(256),
        "qwen3" | "qwen3_moe" | "qwen3_vl" | "qwen3_vl_moe" | "llama4" | "glm4_moe" => Some(128),
        "gpt_oss" => Some(64),
        _ => None,
    }
}

/// Query and KV heads of the one released family whose files leave them out.
pub(super) fn default_heads(model_type: &str) -> Option<(u64, u64)> {
    (family(model_type) == "gemma3").then_some((8, 4))
}

/// Every how many layers one is full, where files leave the pattern to the class.
pub(super) fn default_pattern(model_type: &str) -> Option<u64> {
    match family(model_type) {
        "gemma2" | "gpt_oss" | "vaultgemma" => Some(2),
        "cohere2" | "olmo3" | "exaone4" => Some(4),
        "gemma3n" => Some(5),
        "gemma3" | "gemma4" => Some(6),
        _ => None,
    }
}
