//! Which layers see which tokens, and which of them keep nothing of their own.

use super::families::{default_pattern, family};
use super::fields::Fields;
use super::shape::Span;
use crate::Result;
use serde_json::Value;

/// Names of the fields that list the layers one by one.
pub(super) const PATTERN_FIELDS: &[&str] =
    &["layer_types", "layers_block_type", "attn_type_list", "layer_block_types", "block_types"];

/// The span of each layer.
pub(super) fn spans(
    fields: &Fields<'_>,
    model_type: &str,
    num_layers: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<Span>> {
    let windows = Windows::read(fields, notes)?;
    for &name in PATTERN_FIELDS {
        if let Some(items) = fields.list(name)? {
            return listed(fields, name, items, num_layers, &windows);
        }
    }
    if let Some(chunk) = windows.chunk {
        return chunked(fields, num_layers, chunk);
    }
    let Some(window) = windows.sliding else { return Ok(vec![Span::Full; num_layers as usize]) };
    if let Some(pattern) = pattern(fields, model_type, notes)? {
        return Ok((0..num_layers).map(|layer| pattern.span(layer, num_layers, window)).collect());
    }
    if family(model_type).starts_with("qwen2") {
        // Qwen2: the window applies from layer `max_window_layers` on.
        let first = fields.count_or_zero("max_window_layers")?.unwrap_or(0);
        let span = |layer| if layer < first { Span::Full } else { Span::Sliding(window) };
        return Ok((0..num_layers).map(span).collect());
    }
    Ok(vec![Span::Sliding(window); num_layers as usize])
}

/// The window sizes that a config gives, after the switches that turn them off.
struct Windows {
    sliding: Option<u64>,
    chunk: Option<u64>,
}

impl Windows {
    fn read(fields: &Fields<'_>, notes: &mut Vec<String>) -> Result<Self> {
        let mut sliding = fields.count(&["sliding_window", "sliding_window_size", "window_size"])?;
        // MPT writes -1 for "no window" inside attn_config.
        if let Some(attn) = fields.object("attn_config") {
            let size = attn.get("sliding_window_size").and_then(Value::as_i64);
            sliding = sliding.or(size.filter(|&tokens| tokens > 0).map(|tokens| tokens as u64));
        }
        if sliding.is_some() && fields.flag("use_sliding_window")? == Some(false) {
            notes.push("sliding_window is ignored: use_sliding_window is false".into());
            sliding = None;
        }
        Ok(Self { sliding, chunk: fields.count(&["attention_chunk_size"])? })
    }
}

fn listed(
    fields: &Fields<'_>,
    name: &'static str,
    items: &[Value],
    num_layers: u64,
    windows: &Windows,
) -> Result<Vec<Span>> {
    if items.len() as u64 != num_layers {
        return Err(fields.fault(name, format!("lists {} layers, the model has {num_layers}", items.len())));
    }
    items.iter().enumerate().map(|(layer, item)| listed_span(fields, name, layer, item, windows)).collect()
}

fn listed_span(
    fields: &Fields<'_>,
    name: &str,
    layer: usize,
    item: &Value,
    windows: &Windows,
) -> Result<Span> {
    let missing = |what: &str| fields.fault(name, format!("layer {layer} is {item}, but there is no {what}"));
    match item.as_str() {
        Some("full_attention" | "attention" | "global" | "full" | "global_attention") => Ok(Span::Full),
        Some("sliding_attention" | "local" | "sliding" | "local_attention") => match windows.sliding {
            Some(window) => Ok(Span::Sliding(window)),
            // A switched-off window leaves full attention; a window that is nowhere is a broken file.
            None if fields.get("sliding_window").is_some() => Ok(Span::Full),
            None => Err(missing("sliding_window")),
        },
        Some("chunked_attention") => {
            windows.chunk.map(Span::Chunked).ok_or_else(|| missing("attention_chunk_size"))
        }
        // MiniMax: 1 is softmax attention, 0 linear attention.
        None if item.as_u64() == Some(1) => Ok(Span::Full),
        _ => Err(fields.fault(
            name,
            format!(
                "layer {layer} is {item}: only attention layers are sized, recurrent state is per request"
            ),
        )),
    }
}

/// Llama 4: layers without rotary positions attend to everything, the others to their chunk.
fn chunked(fields: &Fields<'_>, num_layers: u64, chunk: u64) -> Result<Vec<Span>> {
    if let Some(items) = fields.list("no_rope_layers")?.filter(|items| !items.is_empty()) {
        if items.len() as u64 != num_layers {
            let text = format!("lists {} layers, the model has {num_layers}", items.len());
            return Err(fields.fault("no_rope_layers", text));
        }
        let span = |item: &Value| if item.as_u64() == Some(0) { Span::Full } else { Span::Chunked(chunk) };
        return Ok(items.iter().map(span).collect());
    }
    let interval = fields.count(&["no_rope_layer_interval"])?.unwrap_or(4);
    let span =
        |layer: u64| if (layer + 1).is_multiple_of(interval) { Span::Full } else { Span::Chunked(chunk) };
    Ok((0..num_layers).map(span).collect())
}

/// A repeating pattern of windowed and full layers.
enum Pattern {
    /// Every so many layers the last is full.
    Every(u64),
    /// One letter a layer, `L` windowed and `G` full; the model's last layer is full.
    Letters(Vec<u8>),
    /// GPT-Neo: one entry a layer.
    Listed(Vec<bool>),
}

impl Pattern {
    fn span(&self, layer: u64, num_layers: u64, window: u64) -> Span {
        let full = match self {
            Self::Every(period) => (layer + 1).is_multiple_of(*period),
            Self::Letters(letters) => {
                letters[layer as usize % letters.len()] == b'G' || layer + 1 == num_layers
            }
            Self::Listed(full) => full.get(layer as usize).copied().unwrap_or(true),
        };
        if full { Span::Full } else { Span::Sliding(window) }
    }
}

fn pattern(fields: &Fields<'_>, model_type: &str, notes: &mut Vec<String>) -> Result<Option<Pattern>> {
    for name in ["sliding_window_pattern", "_sliding_window_pattern"] {
        match fields.get(name) {
            None => {}
            Some(Value::String(letters))
                if !letters.is_empty() && letters.bytes().all(|b| b"LG".contains(&b)) =>
            {
                return Ok(Some(Pattern::Letters(letters.clone().into_bytes())));
            }
            Some(value) => return fields.as_count(name, value, 1).map(|period| Some(Pattern::Every(period))),
        }
    }
    if let Some(items) = fields.list("attention_types")? {
        return gpt_neo(fields, items).map(|full| Some(Pattern::Listed(full)));
    }
    let Some(period) = default_pattern(model_type) else { return Ok(None) };
    notes.push(format!("layer pattern: one full layer in {period}, the default of class {model_type}"));
    Ok(Some(Pattern::Every(period)))
}

/// `[[["global", "local"], 12]]`: kinds, and how often they repeat.
fn gpt_neo(fields: &Fields<'_>, items: &[Value]) -> Result<Vec<bool>> {
    let fault = || fields.fault("attention_types", "expected [[[\"global\", \"local\"], repeats], ...]");
    let mut full = Vec::new();
    for item in items {
        let kinds = item.get(0).and_then(Value::as_array).ok_or_else(fault)?;
        let repeats = item.get(1).and_then(Value::as_u64).filter(|&n| n <= 4096).ok_or_else(fault)?;
        for _ in 0..repeats {
            for kind in kinds {
                full.push(kind.as_str().ok_or_else(fault)? == "global");
            }
        }
    }
    Ok(full)
}
