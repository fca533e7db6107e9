//! What a model keeps for each token, layer by layer, before any deployment choice.

use super::weights::Weights;

/// Which earlier tokens a layer looks at, hence how long it keeps their K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Span {
    /// All of them.
    Full,
    /// The last so many tokens.
    Sliding(u64),
    /// Those of the token's own chunk of so many tokens.
    Chunked(u64),
}

impl Span {
    /// Tokens after which a layer's cost stops growing, or `None` if it never does.
    pub fn window(self) -> Option<u64> {
        match self {
            Self::Full => None,
            Self::Sliding(tokens) | Self::Chunked(tokens) => Some(tokens),
        }
    }

    /// The first position that a query at `position` sees.
    pub fn first_visible(self, position: u32) -> u32 {
        // A window that does not fit 32 bits is wider than any position.
        let size = |tokens: u64| u32::try_from(tokens.max(1)).unwrap_or(u32::MAX);
        match self {
            Self::Full => 0,
            Self::Sliding(window) => position.saturating_sub(size(window) - 1),
            Self::Chunked(chunk) => position - position % size(chunk),
        }
    }

    /// Most blocks that a sequence has at once while `num_tokens` tokens are computed, `ahead` at a time. Not less than
    /// that is enough, whatever the blocks' phase.
    pub fn peak_blocks(self, num_tokens: u64, ahead: u64, block_size: u64) -> u64 {
        let all = num_tokens.div_ceil(block_size);
        let Some(window) = self.window() else { return all };
        let seen = window - 1 + ahead;
        // A chunk that is whole blocks begins with one; other spans may begin and end inside a block.
        let is_aligned = matches!(self, Self::Chunked(chunk) if chunk.is_multiple_of(block_size));
        all.min(if is_aligned {
            seen.div_ceil(block_size)
        } else {
            (seen + block_size - 1).div_ceil(block_size)
        })
    }

    /// The name that is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Sliding(_) => "sliding",
            Self::Chunked(_) => "chunked",
        }
    }
}

/// What a layer stores for one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerCache {
    /// K and V of each KV head.
    Heads {
        /// Heads of K and V; fewer than query heads under GQA, 1 under MQA.
        num_kv_heads: u64,
        /// Elements of a K vector.
        key_dim: u64,
        /// Elements of a V vector.
        value_dim: u64,
    },
    /// One compressed vector and its rotary part, for all heads together (MLA).
    Latent {
        /// Elements of the compressed vector.
        kv_lora_rank: u64,
        /// Elements of the rotary key.
        rope_dim: u64,
    },
    /// Nothing: the layer reads another layer's K and V, or has no attention.
    Nothing,
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Which tokens it keeps.
    pub span: Span,
    /// What it keeps of each.
    pub cache: LayerCache,
}

/// A model as its config describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// The config's `model_type`, or `unknown`.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Positions that the model was trained for, if the config says.
    pub max_positions: Option<u64>,
    /// Size of the vocabulary, if the config says.
    pub vocab_size: Option<u64>,
    /// Width of the feed-forward part, if the config says.
    pub intermediate_size: Option<u64>,
    /// The decoder layers in order.
    pub layers: Vec<Layer>,
    /// Type of the released weights, if the config says.
    pub checkpoint_dtype: Option<String>,
    /// Parameters of the weights, and what each takes.
    pub weights: Weights,
    /// What was taken from a class default or left out, in sentences.
    pub notes: Vec<String>,
}

impl ModelShape {
    /// Layers that store something.
    pub fn caching_layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().filter(|layer| layer.cache != LayerCache::Nothing)
    }

    /// `MHA`, `GQA`, `MQA` or `MLA`, by the first layer that stores something.
    pub fn attention(&self) -> &'static str {
        match self.caching_layers().next().map(|layer| layer.cache) {
            Some(LayerCache::Latent { .. }) => "MLA",
            Some(LayerCache::Heads { num_kv_heads: 1, .. }) if self.num_attention_heads > 1 => "MQA",
            Some(LayerCache::Heads { num_kv_heads, .. }) if num_kv_heads < self.num_attention_heads => "GQA",
            _ => "MHA",
        }
    }

    /// KV heads and key size of the first layer that stores them; `None` under MLA.
    pub fn heads(&self) -> Option<(u64, u64)> {
        self.caching_layers().find_map(|layer| match layer.cache {
            LayerCache::Heads { num_kv_heads, key_dim, .. } => Some((num_kv_heads, key_dim)),
            _ => None,
        })
    }
}
