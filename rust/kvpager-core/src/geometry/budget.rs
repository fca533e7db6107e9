//! The memory budget: every part of a device's memory, with its size and where the number comes from.
//!
//! `cache = min(share * total, free) - weights - activations - workspace - communication - runtime - graphs -
//! safety margin`, in whole blocks. Taking the total alone over-commits a device that something else already
//! uses.

use super::batch_arrays::{BatchArray, BatchLimits};
use super::kv::KvGeometry;
use crate::error::count;
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
    /// `left_over`, `not_offered`.
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
    /// What attention kernels keep besides a batch's arrays (work lists and partial results); it counts when the
    /// workspace is estimated. The kernels know it, not this crate.
    pub split_plans: u64,
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
            split_plans: 0,
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
    /// Longest single request that fits when the tables are made for it, or `u64::MAX` if nothing bounds it.
    pub longest_request: u64,
}

/// What is left for blocks.
struct Room {
    available: u64,
    parts: Vec<BudgetPart>,
    used: u64,
    cache: u64,
    num_blocks: u64,
}

impl Room {
    fn new(geometry: &KvGeometry, input: &BudgetInput, available: u64) -> Result<Self> {
        let parts = fixed_parts(geometry, input)?;
        let used = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
        let cache = available.saturating_sub(used);
        // Block ids are 32-bit and one value is kept for "none".
        let num_blocks = (cache / geometry.block_bytes(input.block_size)).min(u64::from(u32::MAX) - 1);
        Ok(Self { available, parts, used, cache, num_blocks })
    }

    fn check(&self, geometry: &KvGeometry, input: &BudgetInput, longest: u64) -> Result<()> {
        let request = input.max_model_tokens.unwrap_or(1);
        let needed = geometry.blocks_for_length(request, input.block_size, input.max_batch_tokens);
        if self.num_blocks >= needed {
            return Ok(());
        }
        let terms: Vec<String> =
            self.parts.iter().map(|part| format!("{} {}", part.name.replace('_', " "), part.bytes)).collect();
        Err(Error::invalid(format!(
            "{} fit{}, but a request of {} needs {needed}: one block is {} bytes, and {} of {} \
             available bytes are left after {} ({}). The longest request that fits has {}. What \
             helps: a shorter --max-model-tokens, a smaller --kv-dtype, more --tp or --pp, fewer \
             --max-batch-tokens, smaller weights; a larger share only if the device has the memory free",
            count(self.num_blocks, "block"),
            if self.num_blocks == 1 { "s" } else { "" },
            count(request, "token"),
            geometry.block_bytes(input.block_size),
            self.cache,
            self.available,
            self.used,
            terms.join(", "),
            count(longest, "token"),
        )))
    }
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
        let room = Room::new(geometry, input, available)?;
        let longest_request = longest_request(geometry, input, available)?;
        room.check(geometry, input, longest_request)?;
        let Room { mut parts, cache, num_blocks, .. } = room;
        let block_bytes = geometry.block_bytes(input.block_size);
        let rest = |name, bytes, note: String| BudgetPart { name, bytes, origin: Origin::Remainder, note };
        let (blocks, beyond) = (num_blocks * block_bytes, input.device_memory.saturating_sub(available));
        parts.push(rest("cache", blocks, format!("{} of {block_bytes} bytes", count(num_blocks, "block"))));
        parts.push(rest("left_over", cache - blocks, "less than a block".into()));
        parts.push(rest("not_offered", beyond, "in use by others, or beyond the share".into()));
        Ok(Self {
            available,
            block_bytes,
            num_blocks,
            max_tokens: num_blocks / geometry.groups().len() as u64 * input.block_size,
            longest_request,
            parts,
        })
    }

    /// Bytes of a part, 0 if it has none.
    pub fn bytes(&self, name: &str) -> u64 {
        self.parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes)
    }
}

/// Requests are at most this long: token positions are signed 32-bit.
const LONGEST: u64 = i32::MAX as u64;

/// The largest `max_model_tokens` with which this input makes a plan: block tables grow with it.
fn longest_request(geometry: &KvGeometry, input: &BudgetInput, available: u64) -> Result<u64> {
    let fits = |length: u64| -> Result<bool> {
        let input = BudgetInput { max_model_tokens: Some(length), ..input.clone() };
        let room = Room::new(geometry, &input, available)?;
        let needed = geometry.blocks_for_length(length, input.block_size, input.max_batch_tokens);
        Ok(needed <= room.num_blocks)
    };
    if fits(LONGEST)? {
        return Ok(u64::MAX);
    }
    let (mut low, mut high) = (0, LONGEST);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle)? { low = middle } else { high = middle - 1 }
    }
    Ok(low)
}

fn fixed_parts(geometry: &KvGeometry, input: &BudgetInput) -> Result<Vec<BudgetPart>> {
    let part = |name, given: Option<u64>, (bytes, note): (u64, String)| match given {
        Some(bytes) => BudgetPart { name, bytes, origin: Origin::Given, note: String::new() },
        None => BudgetPart { name, bytes, origin: Origin::Estimated, note },
    };
    let weights = match input.weights {
        Some(_) => (0, String::new()),
        None => geometry.estimated_weights()?,
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

/// Peak of a forward pass in 16 bits, and 2 % for the allocator's rounding. In a layer: the residual stream and
/// its normed copy, and either Q, K, V (or the latent) and the attention output, or the gate, the up projection
/// and their product. After the layers: the stream, and float32 logits and probabilities of the sampled rows.
fn activations(geometry: &KvGeometry, input: &BudgetInput) -> (u64, String) {
    let shape = geometry.shape();
    let attention = geometry.cached_layers().map(|layer| layer.attention_width()).max().unwrap_or(0);
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

/// A batch's arrays, and what the attention kernels keep besides.
fn workspace(geometry: &KvGeometry, input: &BudgetInput) -> (u64, String) {
    let limits = BatchLimits {
        block_size: input.block_size,
        max_batch_tokens: input.max_batch_tokens,
        max_running: input.max_running,
        max_model_tokens: input.max_model_tokens,
    };
    let arrays = geometry.batch_arrays(limits);
    let arrays = arrays.iter().map(BatchArray::bytes).fold(0, u64::saturating_add);
    let plans = input.split_plans;
    let note = match plans {
        0 => format!("{arrays} bytes of a batch's arrays"),
        _ => format!("{arrays} bytes of a batch's arrays, {plans} of split plans"),
    };
    (arrays.saturating_add(plans), note)
}

fn communication(geometry: &KvGeometry, input: &BudgetInput) -> (u64, String) {
    let options = geometry.options();
    if options.tensor_parallel * options.pipeline_parallel == 1 {
        return (0, "one device".into());
    }
    let buffers = 2 * 2 * input.max_batch_tokens * geometry.shape().hidden_size;
    (buffers + 256 * MIB, "two 16-bit activations of the largest batch, and 256 MiB of channels".into())
}
