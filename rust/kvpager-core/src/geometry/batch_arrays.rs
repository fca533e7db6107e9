//! The arrays that a batch brings to the device: one list, from which a plan counts and its check allocates.

use super::kv::KvGeometry;

/// Positions that block tables are made for when neither the caller nor the config says.
const DEFAULT_POSITIONS: u64 = 131_072;

/// The limits of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Tokens of a block.
    pub block_size: u64,
    /// Query tokens.
    pub max_batch_tokens: u64,
    /// Sequences.
    pub max_running: u64,
    /// Longest request; `None`: what the config says, or 131,072.
    pub max_model_tokens: Option<u64>,
}

/// One array of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchArray {
    /// Its name in a batch.
    pub name: &'static str,
    /// Its layer group, for those that exist once a group.
    pub group: Option<usize>,
    /// Bytes of an element: 4 or 8.
    pub item_bytes: u64,
    /// Rows, and elements of a row.
    pub shape: (u64, u64),
}

impl BatchArray {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.0.saturating_mul(self.shape.1).saturating_mul(self.item_bytes)
    }
}

impl KvGeometry {
    /// The arrays of the largest batch. A block table has a row a running sequence and is as wide as the longest
    /// request.
    pub fn batch_arrays(&self, limits: BatchLimits) -> Vec<BatchArray> {
        let (tokens, rows) = (limits.max_batch_tokens, limits.max_running);
        let one = |name, elements| BatchArray { name, group: None, item_bytes: 4, shape: (1, elements) };
        let mut arrays = vec![
            one("token_ids", tokens),
            one("positions", tokens),
            one("token_source", tokens),
            one("query_start", rows + 1),
            one("context_lens", rows),
            one("sample_rows", rows),
        ];
        let longest = limits.max_model_tokens.or(self.shape().max_positions).unwrap_or(DEFAULT_POSITIONS);
        for group in 0..self.groups().len() {
            let of = |name, item_bytes, shape| BatchArray { name, group: Some(group), item_bytes, shape };
            arrays.push(of("slot_mapping", 8, (1, tokens)));
            arrays.push(of("table_rows", 4, (1, rows)));
            arrays.push(of("block_tables", 4, (rows, longest.div_ceil(limits.block_size))));
        }
        arrays
    }
}
