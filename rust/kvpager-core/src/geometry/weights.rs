//! An estimate of the weights' bytes from a config, for when no file says better.

use super::fields::Fields;
use super::shape::{LayerCache, ModelShape};
use crate::Result;

/// Estimated bytes of the weights and how they were estimated, or `None` if the config cannot tell.
///
/// Counts embeddings, attention projections and the feed-forward part (all experts); norms and biases are left
/// out, which is below 0.1 % for models of a billion parameters and more.
pub(super) fn estimate(fields: &Fields<'_>, shape: &ModelShape) -> Result<Option<(u64, String)>> {
    let Some((bits, how)) = bits_per_parameter(fields, shape)? else { return Ok(None) };
    let mut parameters = embeddings(fields, shape)?;
    for layer in &shape.layers {
        parameters += attention(fields, shape, layer.cache)?;
    }
    parameters += feed_forward(fields, shape)?;
    let bytes = parameters.saturating_mul(u128::from(bits)) / 8;
    let mut text = format!("{:.2} B parameters in {how}", parameters as f64 / 1e9);
    if shape.vocab_size.is_none() {
        text.push_str("; no vocab_size: embeddings not counted");
    }
    Ok(Some((u64::try_from(bytes).unwrap_or(u64::MAX), text)))
}

/// A dtype of weights by one of its usual names, with or without `torch.`; `auto` says nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] with the field.
pub(super) fn known_dtype(fields: &Fields<'_>, field: &str, name: String) -> Result<Option<String>> {
    let plain = name.strip_prefix("torch.").unwrap_or(&name);
    if plain == "auto" {
        return Ok(None);
    }
    match dtype_bits(plain) {
        Some(_) => Ok(Some(plain.to_owned())),
        None => Err(fields.fault(
            field,
            format!("is \"{name}\", expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8"),
        )),
    }
}

fn dtype_bits(name: &str) -> Option<u64> {
    match name {
        "float32" | "fp32" | "float" => Some(32),
        "float16" | "bfloat16" | "fp16" | "bf16" | "half" => Some(16),
        "float8_e4m3fn" | "float8_e5m2" | "fp8" | "int8" | "uint8" => Some(8),
        _ => None,
    }
}

fn bits_per_parameter(fields: &Fields<'_>, shape: &ModelShape) -> Result<Option<(u64, String)>> {
    if let Some(quantization) = fields.object("quantization_config") {
        let bits = quantization
            .get("bits")
            .and_then(serde_json::Value::as_u64)
            .filter(|&bits| (1..=16).contains(&bits));
        let method = quantization.get("quant_method").and_then(serde_json::Value::as_str).unwrap_or("");
        return Ok(match (bits, method) {
            (Some(bits), _) => Some((bits, format!("{bits} bits"))),
            (None, "fp8") => Some((8, "fp8".into())),
            // Mixed precision: which tensors are quantised is not in the config.
            (None, _) => None,
        });
    }
    Ok(match shape.checkpoint_dtype.as_deref() {
        Some(dtype) => dtype_bits(dtype).map(|bits| (bits, dtype.into())),
        None => Some((16, "16 bits (the config names no dtype)".into())),
    })
}

fn embeddings(fields: &Fields<'_>, shape: &ModelShape) -> Result<u128> {
    let table = u128::from(shape.vocab_size.unwrap_or(0)) * u128::from(shape.hidden_size);
    let tied = fields.flag("tie_word_embeddings")?.unwrap_or(false);
    Ok(if tied { table } else { 2 * table })
}

fn attention(fields: &Fields<'_>, shape: &ModelShape, cache: LayerCache) -> Result<u128> {
    let hidden = u128::from(shape.hidden_size);
    let heads = u128::from(shape.num_attention_heads);
    Ok(match cache {
        LayerCache::Nothing => 0,
        LayerCache::Heads { num_kv_heads, key_dim, value_dim } => {
            let (key, value) = (u128::from(key_dim), u128::from(value_dim));
            hidden * (heads * key + heads * value + u128::from(num_kv_heads) * (key + value))
        }
        LayerCache::Latent { kv_lora_rank, rope_dim } => {
            let (rank, rope) = (u128::from(kv_lora_rank), u128::from(rope_dim));
            let nope = u128::from(fields.count(&["qk_nope_head_dim"])?.unwrap_or(rope_dim));
            let value = u128::from(fields.count(&["v_head_dim"])?.unwrap_or(rope_dim));
            let query = match fields.count(&["q_lora_rank"])? {
                Some(q_rank) => u128::from(q_rank) * (hidden + heads * (nope + rope)),
                None => hidden * heads * (nope + rope),
            };
            query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        }
    })
}

fn feed_forward(fields: &Fields<'_>, shape: &ModelShape) -> Result<u128> {
    let hidden = u128::from(shape.hidden_size);
    let layers = shape.layers.len() as u128;
    // A gated part has three matrices of the given width; without a width, two of four times the model's.
    let dense = match shape.intermediate_size {
        Some(width) => 3 * hidden * u128::from(width),
        None => 8 * hidden * hidden,
    };
    let experts = fields.count(&["num_local_experts", "n_routed_experts", "num_experts"])?;
    let Some(experts) = experts.filter(|&experts| experts > 1) else { return Ok(layers * dense) };
    let width = fields.count(&["moe_intermediate_size"])?.or(shape.intermediate_size);
    let Some(width) = width else { return Ok(layers * dense) };
    let shared = fields.count_or_zero("n_shared_experts")?.unwrap_or(0);
    let expert = 3 * hidden * u128::from(width);
    let first_dense = u128::from(fields.count_or_zero("first_k_dense_replace")?.unwrap_or(0)).min(layers);
    Ok(first_dense * dense
        + (layers - first_dense) * (u128::from(experts + shared) * expert + hidden * u128::from(experts)))
}
