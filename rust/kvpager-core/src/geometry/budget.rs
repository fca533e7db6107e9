//! The memory budget: every part of a device's memory, with its size and where the number comes from.
//!
//! `cache = min(share * total, free) - weights - activations - workspace - communication - runtime - graphs -
//! safety margin`. Taking the total alone over-commits a device that something else already uses.

use super::kv::KvGeometry;
use crate::{Error, Result};

const MIB: u64 = 1 << 20;

/// Where a number comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The caller gave it.
    Given,
    /// A formula gave it; the part's note has the formula.
    Estimated,
    /// It was read from the device.
    Measured,
    /// It follows from the other parts.
    Remainder,
}

impl Origin {
    /// The name that is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Estimated => "estimated",
            Self::Measured => "measured",
            Self::Remainder => "remainder",
        }
    }
}

/// One part of the device's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetPart {
    /// `weights`, `activations`, `workspace`, `communication`, `runtime`, `graphs`, `safety_margin`, `cache`,
    /// `not_offered`.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: u64,
    /// Where they come from.
    pub origin: Origin,
    /// The formula or the source, in a few words.
    pub note: String,
}

/// What a budget is made from. Parts that are `None` are estimated.
#[derive(Clone, Debug, PartialEq)]
pub struct BudgetInput {
    /// Bytes of the device.
    pub device_memory: u64,
    /// Bytes free before anything of this engine is loaded; `None` means all.
    pub device_free: Option<u64>,
    /// Share of the device that may be used, above 0 and at most 1.
    pub device_share: f64,
    /// Bytes of the weights on this device.
    pub weights: Option<u64>,
    /// Peak bytes of activations.
    pub activations: Option<u64>,
    /// Bytes of the attention workspace.
    pub workspace: Option<u64>,
    /// Bytes of the buffers of collectives.
    pub communication: Option<u64>,
    /// Bytes of the device runtime and its libraries.
    pub runtime: Option<u64>,
    /// Bytes of captured graphs.
    pub graphs: Option<u64>,
    /// Bytes kept free.
    pub safety_margin: Option<u64>,
    /// Tokens of a block.
    pub block_size: u64,
    /// Tokens of the largest batch.
    pub max_batch_tokens: u64,
    /// Sequences of the largest batch.
    pub max_running: u64,
    /// Longest request that must fit, if any.
    pub max_model_tokens: Option<u64>,
}

impl BudgetInput {
    /// A device with usual limits: blocks of 16, batches of 8,192 tokens and 256 sequences, everything estimated.
    pub fn new(device_memory: u64) -> Self {
        Self {
            device_memory,
            device_free: None,
            device_share: 1.0,
            weights: None,
            activations: None,
            workspace: None,
            communication: None,
            runtime: None,
            graphs: None,
            safety_margin: None,
            block_size: 16,
            max_batch_tokens: 8192,
            max_running: 256,
            max_model_tokens: None,
        }
    }

    fn validate(&self) -> Result<()> {
        let mut faults = Vec::new();
        if self.device_memory == 0 {
            faults.push("device memory is 0".to_owned());
        }
        if !(self.device_share > 0.0 && self.device_share <= 1.0) {
            faults.push(format!("device share is {}, expected above 0 and at most 1", self.device_share));
        }
        if let Some(free) = self.device_free.filter(|&free| free > self.device_memory) {
            faults.push(format!("free device memory {free} exceeds the total {}", self.device_memory));
        }
        if !(1..=1 << 20).contains(&self.block_size) {
            faults.push(format!("block size is {}, expected 1 to {}", self.block_size, 1 << 20));
        }
        if self.max_batch_tokens == 0 || self.max_running == 0 || self.max_model_tokens == Some(0) {
            faults.push("batch tokens, running sequences and model tokens must be at least 1".to_owned());
        }
        if faults.is_empty() { Ok(()) } else { Err(Error::invalid(faults.join("; "))) }
    }
}

/// A device's memory, part by part.
#[derive(Clone, Debug, PartialEq)]
pub struct Budget {
    /// The parts; their bytes sum to the device's memory.
    pub parts: Vec<BudgetPart>,
    /// `min(share * total, free)`.
    pub available: u64,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Blocks that fit.
    pub num_blocks: u64,
    /// Tokens that fit when every sequence is inside its windows: each layer group needs its own blocks.
    pub max_tokens: u64,
    /// Longest single request that fits.
    pub longest_request: u64,
    /// Bytes of a batch's arrays, which are part of the workspace.
    pub batch_array_bytes: u64,
}

impl Budget {
    /// Makes the budget of a deployed model.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with every term when nothing is left for blocks, or when a request of
    /// `max_model_tokens` does not fit; the text says what one block costs, what is left, what is needed, the
    /// longest request that does fit, and what helps.
    pub fn new(geometry: &KvGeometry, input: &BudgetInput) -> Result<Self> {
        input.validate()?;
        let share = (input.device_memory as f64 * input.device_share) as u64;
        let available = share.min(input.device_free.unwrap_or(input.device_memory));
        let mut parts = fixed_parts(geometry, input)?;
        let used: u64 = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        let cache = available.saturating_sub(used);
        let block_bytes = geometry.block_bytes(input.block_size);
        // Block ids are 32-bit and one value is kept for "none".
        let num_blocks = (cache / block_bytes).min(u64::from(u32::MAX) - 1);
        let num_groups = geometry.groups().len() as u64;
        let budget = Self {
            available,
            block_bytes,
            num_blocks,
            max_tokens: num_blocks / num_groups * input.block_size,
            batch_array_bytes: batch_array_bytes(geometry, input),
            longest_request: geometry.longest_length(num_blocks, input.block_size, input.max_batch_tokens),
            parts: {
                let left = cache - num_blocks * block_bytes;
                let note = format!("{num_blocks} blocks of {block_bytes} bytes; {left} bytes are left over");
                parts.push(BudgetPart { name: "cache", bytes: cache, origin: Origin::Remainder, note });
                let rest = input.device_memory.saturating_sub(used.saturating_add(cache));
                let note = "in use by others, or beyond the share".to_owned();
                parts.push(BudgetPart { name: "not_offered", bytes: rest, origin: Origin::Remainder, note });
                parts
            },
        };
        budget.check(geometry, input, used)?;
        Ok(budget)
    }

    fn check(&self, geometry: &KvGeometry, input: &BudgetInput, used: u64) -> Result<()> {
        let request = input.max_model_tokens.unwrap_or(1);
        let needed = geometry.blocks_for_length(request, input.block_size, input.max_batch_tokens);
        if self.num_blocks >= needed {
            return Ok(());
        }
        let terms: Vec<String> = self.parts[..self.parts.len() - 2]
            .iter()
            .map(|part| format!("{} {}", part.name.replace('_', " "), part.bytes))
            .collect();
        Err(Error::invalid(format!(
            "{} blocks fit, but a request of {request} tokens needs {needed}: one block is {} bytes, and {} of \
             {} available bytes are left after {} ({}). The longest request that fits has {} tokens. What helps: \
             a shorter --max-model-tokens, a smaller --kv-dtype, more --tp or --pp, fewer --max-batch-tokens, \
             smaller weights; a larger share only if the device has the memory free",
            self.num_blocks,
            self.block_bytes,
            self.available.saturating_sub(used),
            self.available,
            used,
            terms.join(", "),
            self.longest_request,
        )))
    }

    /// Bytes of a part, 0 if it has none.
    pub fn bytes(&self, name: &str) -> u64 {
        self.parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes)
    }
}

fn fixed_parts(geometry: &KvGeometry, input: &BudgetInput) -> Result<Vec<BudgetPart>> {
    let part = |name, given: Option<u64>, (bytes, note): (u64, String)| match given {
        Some(bytes) => BudgetPart { name, bytes, origin: Origin::Given, note: String::new() },
        None => BudgetPart { name, bytes, origin: Origin::Estimated, note },
    };
    let weights = match input.weights {
        Some(_) => (0, String::new()),
        None => weights(geometry)?,
    };
    let margin = (input.device_memory / 50, "2 % of the device".to_owned());
    Ok(vec![
        part("weights", input.weights, weights),
        part("activations", input.activations, activations(geometry, input)),
        part("workspace", input.workspace, workspace(geometry, input)),
        part("communication", input.communication, communication(geometry, input)),
        part("runtime", input.runtime, (600 * MIB, "device context and libraries: 600 MiB".into())),
        part("graphs", input.graphs, (320 * MIB, "captured decode graphs: 32 sizes of 10 MiB".into())),
        part("safety_margin", input.safety_margin, margin),
    ])
}

fn weights(geometry: &KvGeometry) -> Result<(u64, String)> {
    let options = geometry.options();
    let devices = options.tensor_parallel * options.pipeline_parallel;
    match &geometry.shape().weights {
        Some((bytes, how)) if devices == 1 => Ok((*bytes, how.clone())),
        Some((bytes, how)) => Ok((bytes.div_ceil(devices), format!("{how}, over {devices} devices"))),
        None => Err(Error::invalid(
            "config field 'quantization_config': the bytes of mixed-precision weights do not follow from it; \
             give --weights BYTES",
        )),
    }
}

/// Heads of queries and of K and V on one device, and their size.
fn heads_on_device(geometry: &KvGeometry) -> (u64, u64, u64) {
    let shape = geometry.shape();
    let tp = geometry.options().tensor_parallel;
    let (kv_heads, head_dim) = shape.heads().unwrap_or((1, shape.hidden_size / shape.num_attention_heads));
    (shape.num_attention_heads / tp, (kv_heads / tp).max(1), head_dim)
}

/// Peak of a forward pass in 16 bits, and 2 % for the allocator's rounding. In a layer: the residual stream and
/// its normed copy, and either Q, K, V and the attention output or the gate, the up projection and their product.
/// After the layers: the stream, and float32 logits and probabilities of the sampled rows.
fn activations(geometry: &KvGeometry, input: &BudgetInput) -> (u64, String) {
    let shape = geometry.shape();
    let (heads, kv_heads, head_dim) = heads_on_device(geometry);
    let attention = (2 * heads + 2 * kv_heads) * head_dim;
    let width = shape.intermediate_size.unwrap_or(4 * shape.hidden_size) / geometry.options().tensor_parallel;
    let per_token = 2 * (2 * shape.hidden_size + attention.max(3 * width));
    let rows = input.max_running.min(input.max_batch_tokens);
    let logits = (2 * 4 * shape.vocab_size.unwrap_or(0) * rows)
        .saturating_add(input.max_batch_tokens.saturating_mul(2 * shape.hidden_size));
    let layer = input.max_batch_tokens.saturating_mul(per_token);
    let note = if layer >= logits {
        format!("{} tokens x {per_token} bytes, and 2 %", input.max_batch_tokens)
    } else {
        format!("logits of {rows} rows beside {} tokens, and 2 %", input.max_batch_tokens)
    };
    let peak = layer.max(logits);
    (peak.saturating_add(peak / 50), note)
}

/// Thread blocks that fill the largest device (two a multiprocessor of 160), which bounds how often the split
/// plan cuts; and rows of the tiles of its kernels (of 4, 16 and 64).
const SPLIT_BLOCKS: u64 = 320;
const TILE_ROWS: [u64; 3] = [4, 16, 64];

/// Attention keeps partial results of the tiles that its split plan cuts, and lists of work: once for each kind of
/// layer. The block tables and the other arrays of a batch are counted here too.
fn workspace(geometry: &KvGeometry, input: &BudgetInput) -> (u64, String) {
    let (heads, kv_heads, _) = heads_on_device(geometry);
    let head_dim = geometry.shape().heads().map_or(512, |(_, dim)| dim);
    let mut spans: Vec<_> = geometry.groups().iter().map(|group| group.span).collect();
    spans.sort_unstable();
    spans.dedup();
    let partial = 2 * SPLIT_BLOCKS * TILE_ROWS.iter().sum::<u64>() * (head_dim + 1) * 4;
    let rows = input.max_batch_tokens.saturating_mul(heads / kv_heads);
    let items: u64 = TILE_ROWS.iter().map(|tile| rows / tile + input.max_running + SPLIT_BLOCKS).sum();
    let plans = spans.len() as u64 * (partial + 48 * items);
    let arrays = batch_array_bytes(geometry, input);
    (
        plans + arrays,
        format!(
            "{} split plans of {SPLIT_BLOCKS} thread blocks; {arrays} bytes of a batch's arrays",
            spans.len()
        ),
    )
}

/// Bytes of a batch's arrays: ids, positions and sources of its tokens; of each layer group their slots, a start
/// and a length a sequence, and the block tables, a row a sequence and as wide as the longest request.
fn batch_array_bytes(geometry: &KvGeometry, input: &BudgetInput) -> u64 {
    let longest = input.max_model_tokens.or(geometry.shape().max_positions).unwrap_or(131_072);
    let table = input.max_running.saturating_mul(longest.div_ceil(input.block_size) * 4);
    let group = table + 8 * input.max_batch_tokens + 8 * (input.max_running + 1);
    12 * input.max_batch_tokens + geometry.groups().len() as u64 * group
}

fn communication(geometry: &KvGeometry, input: &BudgetInput) -> (u64, String) {
    let options = geometry.options();
    if options.tensor_parallel * options.pipeline_parallel == 1 {
        return (0, "one device".into());
    }
    let buffers = 2 * 2 * input.max_batch_tokens * geometry.shape().hidden_size;
    (buffers + 256 * MIB, "two 16-bit activations of the largest batch, and 256 MiB of channels".into())
}
