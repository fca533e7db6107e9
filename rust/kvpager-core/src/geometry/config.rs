//! Reads a Hugging Face `config.json` into a [`ModelShape`].

use super::families::{self, default_head_dim, default_heads};
use super::fields::Fields;
use super::layers::{PATTERN_FIELDS, spans};
use super::shape::{Layer, LayerCache, ModelShape, Span};
use super::weights;
use crate::{Error, Result};
use serde_json::{Map, Value};

const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const HEADS: &[&str] = &["num_attention_heads", "n_head", "n_heads", "num_heads"];
const HIDDEN: &[&str] = &["hidden_size", "n_embd", "d_model", "n_embed", "dim"];
const POSITIONS: &[&str] =
    &["max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", "max_sequence_length"];
const KV_HEADS: &[&str] = &["num_key_value_heads", "n_kv_heads", "n_head_kv", "num_query_groups"];
/// Objects that wrap the language model of a multimodal config.
const WRAPPERS: &[&str] =
    &["text_config", "llm_config", "language_config", "language_model", "thinker_config"];

impl ModelShape {
    /// Reads a config by the key names of its own family.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the field and the reason, for a broken config and for one whose cache
    /// this library cannot size.
    pub fn from_config_json(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| Error::invalid(format!("config is not JSON: {error}")))?;
        let Value::Object(root) = &value else {
            return Err(Error::invalid("config is not a JSON object"));
        };
        Self::from_object(root, "", None)
    }

    fn from_object(map: &Map<String, Value>, prefix: &str, outer: Option<&Fields<'_>>) -> Result<Self> {
        let fields = Fields::new(map, prefix);
        if fields.count(LAYERS)?.is_none() {
            for &name in WRAPPERS {
                if let Some(inner) = fields.object(name) {
                    return Self::from_object(inner, &format!("{prefix}{name}."), Some(&fields));
                }
            }
        }
        Reader::new(fields, outer)?.read()
    }
}

/// One pass over a config.
struct Reader<'a> {
    fields: Fields<'a>,
    model_type: String,
    num_layers: u64,
    num_heads: u64,
    hidden_size: Option<u64>,
    dtype: Option<String>,
    notes: Vec<String>,
}

impl<'a> Reader<'a> {
    fn new(fields: Fields<'a>, outer: Option<&Fields<'_>>) -> Result<Self> {
        let named = |name| -> Result<Option<String>> {
            let inner = fields.text(name)?;
            let value = inner.or(outer.map(|outer| outer.text(name)).transpose()?.flatten());
            Ok(value.map(str::to_owned))
        };
        let model_type = named("model_type")?.unwrap_or_else(|| "unknown".into());
        let has_pattern = PATTERN_FIELDS.iter().any(|name| fields.get(name).is_some());
        families::refuse_unsized(&fields, &model_type, has_pattern)?;
        let num_layers = fields.required(LAYERS, "number of layers")?;
        if num_layers > 4096 {
            return Err(
                fields.fault(LAYERS[0], format!("is {num_layers}, more than 4096 layers are not believed"))
            );
        }
        let mut notes = Vec::new();
        let default = default_heads(&model_type).filter(|_| fields.count(HEADS).is_ok_and(|n| n.is_none()));
        let num_heads = match default {
            Some((heads, _)) => {
                notes.push(format!("num_attention_heads {heads}: the default of class {model_type}"));
                heads
            }
            None => fields.required(HEADS, "number of query heads")?,
        };
        let dtype = match named("torch_dtype")? {
            Some(dtype) => weights::known_dtype(&fields, "torch_dtype", dtype)?,
            None => match named("dtype")? {
                Some(dtype) => weights::known_dtype(&fields, "dtype", dtype)?,
                None => None,
            },
        };
        let hidden_size = fields.count(HIDDEN)?;
        Ok(Self { fields, model_type, num_layers, num_heads, hidden_size, dtype, notes })
    }

    fn read(mut self) -> Result<ModelShape> {
        let spans = spans(&self.fields, &self.model_type, self.num_layers, &mut self.notes)?;
        let mut layers = match self.latent()? {
            Some(cache) => spans.iter().map(|&span| Layer { span, cache }).collect(),
            None => self.head_layers(&spans)?,
        };
        self.share(&mut layers)?;
        if self.fields.count_or_zero("num_nextn_predict_layers")?.unwrap_or(0) > 0 {
            self.notes.push("num_nextn_predict_layers: draft layers are not counted".into());
        }
        let hidden_size = match self.hidden_size {
            Some(width) => width,
            None => self.fields.required(HIDDEN, "width of the model")?,
        };
        let mut shape = ModelShape {
            model_type: self.model_type,
            hidden_size,
            num_attention_heads: self.num_heads,
            max_positions: self.fields.count(POSITIONS)?,
            vocab_size: self.fields.count(&["vocab_size", "padded_vocab_size", "n_vocab"])?,
            intermediate_size: self.fields.count(&[
                "intermediate_size",
                "ffn_hidden_size",
                "n_inner",
                "ffn_dim",
            ])?,
            layers,
            checkpoint_dtype: self.dtype,
            weights: weights::Weights::default(),
            notes: self.notes,
        };
        shape.weights = weights::Weights::read(&self.fields, &shape)?;
        Ok(shape)
    }

    /// MLA: one latent for all heads; `num_key_value_heads` means nothing then.
    fn latent(&self) -> Result<Option<LayerCache>> {
        let Some(kv_lora_rank) = self.fields.count(&["kv_lora_rank"])? else { return Ok(None) };
        let rope_dim = self.fields.required(&["qk_rope_head_dim"], "rotary part of the latent cache")?;
        if self.model_type.starts_with("longcat") {
            return Err(self.fields.fault("model_type", "two attention blocks a layer are not sized"));
        }
        Ok(Some(LayerCache::Latent { kv_lora_rank, rope_dim }))
    }

    fn head_layers(&mut self, spans: &[Span]) -> Result<Vec<Layer>> {
        let kv_heads = self.kv_heads()?;
        let key_dim = self.head_dim()?;
        let value_dim = self.fields.count(&["v_head_dim"])?.unwrap_or(key_dim);
        let full_dim = self.full_head_dim()?;
        let full_heads = self.fields.count(&["num_global_key_value_heads"])?;
        let window_heads = self.fields.count(&["swa_num_key_value_heads"])?;
        let layer = |(index, &span): (usize, &Span)| {
            let mut num_kv_heads = kv_heads[index];
            let (mut key_dim, mut value_dim) = (key_dim, value_dim);
            if span == Span::Full {
                num_kv_heads = full_heads.unwrap_or(num_kv_heads);
                (key_dim, value_dim) = full_dim.map_or((key_dim, value_dim), |dim| (dim, dim));
            } else if num_kv_heads > 0 {
                num_kv_heads = window_heads.unwrap_or(num_kv_heads);
            }
            let cache = match num_kv_heads {
                0 => LayerCache::Nothing,
                _ => LayerCache::Heads { num_kv_heads, key_dim, value_dim },
            };
            Layer { span, cache }
        };
        Ok(spans.iter().enumerate().map(layer).collect())
    }

    /// Gemma 4 uses wider heads in its full layers.
    fn full_head_dim(&mut self) -> Result<Option<u64>> {
        let dim = self.fields.count(&["global_head_dim"])?;
        if dim.is_none() && families::family(&self.model_type) == "gemma4" {
            self.notes.push(format!("global_head_dim 512: the default of class {}", self.model_type));
            return Ok(Some(512));
        }
        Ok(dim)
    }

    fn head_dim(&mut self) -> Result<u64> {
        if let Some(dim) = self.fields.count(&["head_dim", "attention_head_dim", "kv_channels"])? {
            return Ok(dim);
        }
        if let Some(dim) = default_head_dim(&self.model_type) {
            self.notes.push(format!("head_dim {dim}: the default of class {}", self.model_type));
            return Ok(dim);
        }
        let hidden = self.fields.required(HIDDEN, "width of the model, from which head_dim follows")?;
        if hidden % self.num_heads != 0 {
            let text = format!("is missing, and {hidden} / {} heads is not a whole number", self.num_heads);
            return Err(self.fields.fault("head_dim", text));
        }
        Ok(hidden / self.num_heads)
    }

    /// KV heads of each layer; 0 for a layer without attention.
    fn kv_heads(&mut self) -> Result<Vec<u64>> {
        if let Some(blocks) = self.fields.list("block_configs")? {
            return self.block_configs(blocks);
        }
        for name in ["num_key_value_heads_per_layer", "num_kv_heads", "num_key_value_heads"] {
            if let Some(Value::Array(items)) = self.fields.get(name) {
                return self.kv_heads_listed(name, items);
            }
        }
        let heads = self.kv_heads_uniform()?;
        self.check_group("num_key_value_heads", heads)?;
        Ok(vec![heads; self.num_layers as usize])
    }

    fn kv_heads_listed(&self, name: &'static str, items: &[Value]) -> Result<Vec<u64>> {
        if items.len() as u64 != self.num_layers {
            let text = format!("lists {} layers, the model has {}", items.len(), self.num_layers);
            return Err(self.fields.fault(name, text));
        }
        items.iter().map(|item| self.fields.as_count(name, item, 0)).collect()
    }

    /// Families differ most in how they say this; see the table in `docs/notes/replay.md`.
    fn kv_heads_uniform(&mut self) -> Result<u64> {
        if let Some(attn) = self.fields.object("attn_config") {
            return self.kv_heads_attn_config(&Fields::new(attn, "attn_config."));
        }
        if let Some(multi_query) = self.fields.flag("multi_query")? {
            return self.kv_heads_multi_query(multi_query);
        }
        if self.fields.flag("multi_query_attention")? == Some(true) {
            return self.fields.required(&["multi_query_group_num"], "number of KV heads");
        }
        if let Some(heads) = self.fields.count(KV_HEADS)? {
            return Ok(heads);
        }
        if let Some(heads) = self.fields.count(&["num_kv_heads"])? {
            return Ok(heads);
        }
        if let Some((_, kv_heads)) = default_heads(&self.model_type) {
            self.notes
                .push(format!("num_key_value_heads {kv_heads}: the default of class {}", self.model_type));
            return Ok(kv_heads);
        }
        Ok(self.num_heads)
    }

    /// Falcon and GPT-BigCode: `multi_query` means one KV head, whatever `num_kv_heads` says, except in
    /// Falcon's newer decoder.
    fn kv_heads_multi_query(&self, multi_query: bool) -> Result<u64> {
        let new_decoder = self.fields.flag("new_decoder_architecture")? == Some(true);
        match (new_decoder, multi_query) {
            (true, _) => Ok(self.fields.count(&["num_kv_heads", "n_head_kv"])?.unwrap_or(self.num_heads)),
            (false, true) => Ok(1),
            (false, false) => Ok(self.num_heads),
        }
    }

    /// MPT and DBRX.
    fn kv_heads_attn_config(&self, attn: &Fields<'_>) -> Result<u64> {
        match attn.text("attn_type")? {
            Some("multiquery_attention") => Ok(1),
            Some("multihead_attention") => Ok(self.num_heads),
            _ => Ok(attn.count(&["kv_n_heads"])?.unwrap_or(self.num_heads)),
        }
    }

    /// Nemotron-NAS: each block says how many query heads share a KV head, or that it has no attention.
    fn block_configs(&self, blocks: &[Value]) -> Result<Vec<u64>> {
        if blocks.len() as u64 != self.num_layers {
            let text = format!("lists {} layers, the model has {}", blocks.len(), self.num_layers);
            return Err(self.fields.fault("block_configs", text));
        }
        let heads_of = |(layer, block): (usize, &Value)| {
            let fault = |text: &str| self.fields.fault("block_configs", format!("layer {layer}: {text}"));
            let attention = block.get("attention").ok_or_else(|| fault("no attention entry"))?;
            let is = |name| attention.get(name).and_then(Value::as_bool) == Some(true);
            if is("no_op") || is("replace_with_linear") {
                return Ok(0);
            }
            match attention.get("n_heads_in_group").and_then(Value::as_u64) {
                Some(group) if group > 0 && self.num_heads.is_multiple_of(group) => {
                    Ok(self.num_heads / group)
                }
                _ => Err(fault("n_heads_in_group does not divide the query heads")),
            }
        };
        blocks.iter().enumerate().map(heads_of).collect()
    }

    fn check_group(&self, name: &str, kv_heads: u64) -> Result<()> {
        if kv_heads == 0 || !self.num_heads.is_multiple_of(kv_heads) {
            let text = format!("is {kv_heads}, which does not divide the {} query heads", self.num_heads);
            return Err(self.fields.fault(name, text));
        }
        Ok(())
    }

    /// Layers that read another layer's K and V keep none of their own.
    fn share(&mut self, layers: &mut [Layer]) -> Result<()> {
        let shared = self.fields.count_or_zero("num_kv_shared_layers")?.unwrap_or(0);
        if shared >= self.num_layers && shared > 0 {
            let text = format!("is {shared} of {} layers: no layer would keep K and V", self.num_layers);
            return Err(self.fields.fault("num_kv_shared_layers", text));
        }
        for layer in layers.iter_mut().rev().take(shared as usize) {
            layer.cache = LayerCache::Nothing;
        }
        if self.fields.flag("use_cla")? == Some(true) {
            let factor = self.fields.count(&["cla_share_factor"])?.unwrap_or(1);
            for (index, layer) in layers.iter_mut().enumerate() {
                if !(index as u64).is_multiple_of(factor) {
                    layer.cache = LayerCache::Nothing;
                }
            }
        }
        Ok(())
    }
}
