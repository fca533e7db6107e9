//! An estimate of the weights' bytes from a config, for when no file says better.

use super::fields::Fields;
use super::kv::stages;
use super::shape::{LayerCache, ModelShape};
use crate::{Error, Result};

/// A model's parameters by where they are, and what each takes.
///
/// Counts embeddings, attention projections and the feed-forward part (all experts); norms and biases are left
/// out, which is below 0.1 % for models of a billion parameters and more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights {
    /// Parameters of each decoder layer.
    pub layers: Vec<u128>,
    /// Parameters of the embedding, and of the head; 0 if the config gives no vocabulary.
    pub table: u128,
    /// Whether head and embedding are one table.
    pub tied: bool,
    /// Bits of a parameter and how they are called; `None` if the config cannot tell.
    pub bits: Option<(u64, String)>,
}

impl Weights {
    /// Reads them from a config.
    pub(super) fn read(fields: &Fields<'_>, shape: &ModelShape) -> Result<Self> {
        let mut layers = feed_forward(fields, shape)?;
        for (parameters, layer) in layers.iter_mut().zip(&shape.layers) {
            *parameters += attention(fields, shape, layer.cache)?;
        }
        Ok(Self {
            layers,
            table: u128::from(shape.vocab_size.unwrap_or(0)) * u128::from(shape.hidden_size),
            tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            bits: bits_per_parameter(fields, shape)?,
        })
    }

    /// Parameters of the whole model.
    pub fn total(&self) -> u128 {
        self.heaviest_stage(1)
    }

    /// Parameters of the heaviest of so many pipeline stages: the first has the embedding and the last the head,
    /// so that both have a copy of a tied table.
    fn heaviest_stage(&self, num_stages: u64) -> u128 {
        let ends = |stage: &std::ops::Range<usize>| {
            let (first, last) = (stage.start == 0, stage.end == self.layers.len());
            let tables = u128::from(first) + u128::from(last);
            if self.tied { tables.min(1) } else { tables }
        };
        stages(self.layers.len(), num_stages as usize)
            .map(|stage| ends(&stage) * self.table + self.layers[stage].iter().sum::<u128>())
            .max()
            .unwrap_or(0)
    }

    /// Estimated bytes on the heaviest device, with how they were estimated.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the config does not tell what a parameter takes.
    pub(super) fn on_device(&self, tensor_parallel: u64, pipeline_parallel: u64) -> Result<(u64, String)> {
        let Some((bits, how)) = &self.bits else {
            return Err(Error::invalid(
                "config field 'quantization_config': the bytes of mixed-precision weights do not follow from \
                 it; give --weights BYTES",
            ));
        };
        let bytes = self.heaviest_stage(pipeline_parallel).saturating_mul(u128::from(*bits)) / 8;
        let mut note = format!("{:.2} B parameters in {how}", self.total() as f64 / 1e9);
        if self.table == 0 {
            note.push_str("; no vocab_size: embeddings not counted");
        }
        match (tensor_parallel, pipeline_parallel) {
            (1, 1) => {}
            (tp, 1) => note.push_str(&format!(", over {tp} devices")),
            (1, pp) => note.push_str(&format!(", the heaviest of {pp} stages")),
            (tp, pp) => note.push_str(&format!(", the heaviest of {pp} stages over {tp} devices each")),
        }
        let bytes = bytes.div_ceil(u128::from(tensor_parallel));
        Ok((u64::try_from(bytes).unwrap_or(u64::MAX), note))
    }

    /// What the heaviest device has of `total` bytes of weights, by the share of its parameters.
    pub(super) fn share(&self, total: u64, tensor_parallel: u64, pipeline_parallel: u64) -> u64 {
        // A few layers of a few parameters at least: the sum is not 0, and the product far from overflow.
        let stage = self.heaviest_stage(pipeline_parallel);
        let bytes = u128::from(total).saturating_mul(stage).div_ceil(self.total().max(1));
        u64::try_from(bytes.div_ceil(u128::from(tensor_parallel))).unwrap_or(u64::MAX)
    }
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

/// Parameters of each layer's feed-forward part.
fn feed_forward(fields: &Fields<'_>, shape: &ModelShape) -> Result<Vec<u128>> {
    let hidden = u128::from(shape.hidden_size);
    // A gated part has three matrices of the given width; without a width, two of four times the model's.
    let dense = match shape.intermediate_size {
        Some(width) => 3 * hidden * u128::from(width),
        None => 8 * hidden * hidden,
    };
    let mut layers = vec![dense; shape.layers.len()];
    let experts = fields.count(&["num_local_experts", "n_routed_experts", "num_experts"])?;
    let Some(experts) = experts.filter(|&experts| experts > 1) else { return Ok(layers) };
    let width = fields.count(&["moe_intermediate_size"])?.or(shape.intermediate_size);
    let Some(width) = width else { return Ok(layers) };
    let shared = fields.count_or_zero("n_shared_experts")?.unwrap_or(0);
    let expert = 3 * hidden * u128::from(width);
    let sparse = u128::from(experts + shared) * expert + hidden * u128::from(experts);
    let first_dense = fields.count_or_zero("first_k_dense_replace")?.unwrap_or(0) as usize;
    layers.iter_mut().skip(first_dense).for_each(|layer| *layer = sparse);
    Ok(layers)
}
