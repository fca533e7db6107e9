//! A model as it is deployed: bytes a token costs on one device, and the groups its layers form.

use super::dtype::{KvDtype, KvScales};
use super::groups::{LayerGroup, split};
use super::shape::{Layer, LayerCache, ModelShape, Span};
use crate::{Error, Result};

/// Length that layer groups are cut for when the config names no maximum.
const DEFAULT_POSITIONS: u64 = 8192;

/// How a model's cache is stored and spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeometryOptions {
    /// Element type of K and V.
    pub kv_dtype: KvDtype,
    /// Where the scales of a quantised cache are.
    pub scales: KvScales,
    /// Devices that share each layer's heads.
    pub tensor_parallel: u64,
    /// Devices that share the layers.
    pub pipeline_parallel: u64,
}

impl Default for GeometryOptions {
    fn default() -> Self {
        let kv_dtype = KvDtype::BFloat16;
        Self { kv_dtype, scales: kv_dtype.default_scales(), tensor_parallel: 1, pipeline_parallel: 1 }
    }
}

/// The KV-cache geometry of a deployed model, on the device that holds most of it.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGeometry {
    shape: ModelShape,
    options: GeometryOptions,
    layer_bytes: Vec<u64>,
    stage: std::ops::Range<usize>,
    groups: Vec<LayerGroup>,
    block_bytes_per_token: u64,
}

impl KvGeometry {
    /// Reads a `config.json` and deploys it; see [`ModelShape::from_config_json`] and [`KvGeometry::new`].
    ///
    /// # Errors
    /// Those of the two.
    ///
    /// # Examples
    /// ```
    /// use kvpager_core::geometry::{GeometryOptions, KvGeometry};
    /// let config = r#"{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    ///                  "hidden_size": 4096}"#;
    /// let geometry = KvGeometry::from_config_json(config, GeometryOptions::default())?;
    /// assert_eq!(geometry.bytes_per_token(), 131072);
    /// # Ok::<(), kvpager_core::Error>(())
    /// ```
    pub fn from_config_json(text: &str, options: GeometryOptions) -> Result<Self> {
        Self::new(ModelShape::from_config_json(text)?, options)
    }

    /// Spreads a model over `tensor_parallel * pipeline_parallel` devices.
    ///
    /// KV heads are split over the tensor-parallel ranks and replicated when there are fewer of them than ranks;
    /// an MLA latent is on every rank. Layers are split into contiguous stages, as even as possible.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if heads or layers cannot be spread so, or if no layer keeps anything.
    pub fn new(shape: ModelShape, options: GeometryOptions) -> Result<Self> {
        let num_layers = shape.layers.len();
        check_spread(&shape, options)?;
        let layer_bytes =
            shape.layers.iter().map(|layer| layer_bytes(layer, options)).collect::<Result<Vec<u64>>>()?;
        let stage = heaviest_stage(&layer_bytes, options.pipeline_parallel as usize);
        let reference = shape.max_positions.unwrap_or(DEFAULT_POSITIONS);
        let caching: Vec<_> = stage
            .clone()
            .filter(|&layer| layer_bytes[layer] > 0)
            .map(|layer| (layer as u32, shape.layers[layer].span, layer_bytes[layer]))
            .collect();
        if caching.is_empty() {
            return Err(Error::invalid(format!("config: none of the {num_layers} layers keeps K and V")));
        }
        let (groups, block_bytes_per_token) = split(&caching, reference);
        Ok(Self { shape, options, layer_bytes, stage, groups, block_bytes_per_token })
    }

    /// The model.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// How it is deployed.
    pub fn options(&self) -> GeometryOptions {
        self.options
    }

    /// The layer groups; every one takes [`Self::block_bytes_per_token`] bytes a token, padding included.
    pub fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    /// Layers whose K and V are on the device with the most of them.
    pub fn layers_per_device(&self) -> usize {
        self.stage.len()
    }

    /// Bytes that one token takes on the device while it is in every layer's window, padding not counted.
    pub fn bytes_per_token(&self) -> u64 {
        self.layer_bytes[self.stage.clone()].iter().sum()
    }

    /// Bytes that each further token adds once every windowed layer is saturated.
    pub fn bytes_per_token_beyond_window(&self) -> u64 {
        let full = |layer: &usize| self.shape.layers[*layer].span == Span::Full;
        self.stage.clone().filter(full).map(|layer| self.layer_bytes[layer]).sum()
    }

    /// Bytes that one token takes on all devices together, replicated heads included.
    pub fn bytes_per_token_all_devices(&self) -> u64 {
        self.layer_bytes.iter().sum::<u64>() * self.options.tensor_parallel
    }

    /// Bytes that a sequence of `length` tokens needs on the device, padding and block rounding not counted.
    pub fn bytes_for_length(&self, length: u64) -> u64 {
        let tokens = |layer: usize| self.shape.layers[layer].span.window().map_or(length, |w| w.min(length));
        self.stage.clone().map(|layer| self.layer_bytes[layer] * tokens(layer)).sum()
    }

    /// Bytes a token of one block, the same in every group.
    pub fn block_bytes_per_token(&self) -> u64 {
        self.block_bytes_per_token
    }

    /// Bytes of one block.
    pub fn block_bytes(&self, block_size: u64) -> u64 {
        self.block_bytes_per_token * block_size
    }

    /// Blocks, over all groups, that one sequence holds at most on its way to `length` tokens when up to
    /// `chunk` of them are computed in one step.
    pub fn blocks_for_length(&self, length: u64, block_size: u64, chunk: u64) -> u64 {
        self.groups.iter().map(|group| group.span.peak_blocks(length, chunk.max(1), block_size)).sum()
    }

    /// Estimated bytes of the weights on the device that has most of them, and how they were estimated. That may
    /// be another stage than the one with most K and V: what both leave is never too much.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the config does not tell what a parameter takes.
    pub(super) fn estimated_weights(&self) -> Result<(u64, String)> {
        self.shape.weights.on_device(self.options.tensor_parallel, self.options.pipeline_parallel)
    }

    /// What the device with most of the weights has of `total` bytes of them: a share of its stage's, which is
    /// estimated from the parameters if there is more than one.
    pub fn weights_on_device(&self, total: u64) -> u64 {
        self.shape.weights.share(total, self.options.tensor_parallel, self.options.pipeline_parallel)
    }

    /// The layers of this device that keep something, in order.
    pub fn cached_layers(&self) -> impl Iterator<Item = CachedLayer> {
        let query_heads = self.shape.num_attention_heads / self.options.tensor_parallel;
        self.stage.clone().filter_map(move |number| {
            let (kv_heads, key_dim, value_dim, latent) = match self.shape.layers[number].cache {
                LayerCache::Nothing => return None,
                LayerCache::Latent { kv_lora_rank, rope_dim } => {
                    (1, kv_lora_rank + rope_dim, kv_lora_rank, true)
                }
                LayerCache::Heads { num_kv_heads, key_dim, value_dim } => {
                    ((num_kv_heads / self.options.tensor_parallel).max(1), key_dim, value_dim, false)
                }
            };
            Some(CachedLayer { number: number as u32, query_heads, kv_heads, key_dim, value_dim, latent })
        })
    }
}

/// The attention of a layer on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedLayer {
    /// Its number in the model.
    pub number: u32,
    /// Query heads.
    pub query_heads: u64,
    /// Heads that it keeps.
    pub kv_heads: u64,
    /// Elements of a key.
    pub key_dim: u64,
    /// Elements of a value; under MLA the front of the key.
    pub value_dim: u64,
    /// Whether it keeps one latent array (MLA) instead of K and V.
    pub latent: bool,
}

impl CachedLayer {
    /// Elements a token of queries, new keys, new values and output.
    pub fn attention_width(&self) -> u64 {
        let values = if self.latent { 0 } else { self.kv_heads * self.value_dim };
        self.query_heads * (self.key_dim + self.value_dim) + self.kv_heads * self.key_dim + values
    }
}

fn check_spread(shape: &ModelShape, options: GeometryOptions) -> Result<()> {
    let (tp, pp) = (options.tensor_parallel, options.pipeline_parallel);
    if tp == 0 || pp == 0 || pp > shape.layers.len() as u64 {
        return Err(Error::invalid(format!(
            "tensor parallel {tp} x pipeline parallel {pp}: both must be at least 1, and {} layers fill at most \
             as many stages",
            shape.layers.len()
        )));
    }
    if !shape.num_attention_heads.is_multiple_of(tp) {
        return Err(Error::invalid(format!(
            "tensor parallel {tp} does not divide the {} query heads",
            shape.num_attention_heads
        )));
    }
    Ok(())
}

fn layer_bytes(layer: &Layer, options: GeometryOptions) -> Result<u64> {
    let element = options.kv_dtype.bytes();
    let scale = options.scales.bytes_per_vector();
    match layer.cache {
        LayerCache::Nothing => Ok(0),
        LayerCache::Latent { kv_lora_rank, rope_dim } => Ok((kv_lora_rank + rope_dim) * element + scale),
        LayerCache::Heads { num_kv_heads, key_dim, value_dim } => {
            let heads = heads_per_rank(num_kv_heads, options.tensor_parallel)?;
            heads
                .checked_mul((key_dim + value_dim) * element + 2 * scale)
                .filter(|&bytes| bytes < 1 << 40)
                .ok_or_else(|| {
                    Error::invalid(format!("{heads} KV heads of {key_dim} and {value_dim}: too large"))
                })
        }
    }
}

/// KV heads on one rank: a share, or one replicated head when ranks outnumber heads.
fn heads_per_rank(num_kv_heads: u64, ranks: u64) -> Result<u64> {
    if num_kv_heads.is_multiple_of(ranks) {
        Ok(num_kv_heads / ranks)
    } else if ranks.is_multiple_of(num_kv_heads) {
        Ok(1)
    } else {
        Err(Error::invalid(format!(
            "tensor parallel {ranks} neither divides nor is a multiple of {num_kv_heads} KV heads"
        )))
    }
}

/// The layers of each contiguous stage when they are split as evenly as possible, longer stages first.
pub(super) fn stages(num_layers: usize, num_stages: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let (share, extra) = (num_layers / num_stages, num_layers % num_stages);
    (0..num_stages).map(move |stage| {
        let start = stage * share + stage.min(extra);
        start..start + share + usize::from(stage < extra)
    })
}

/// The first of the stages with the most bytes.
fn heaviest_stage(layer_bytes: &[u64], num_stages: usize) -> std::ops::Range<usize> {
    let bytes = |stage: &std::ops::Range<usize>| layer_bytes[stage.clone()].iter().sum::<u64>();
    // Of equals `max_by_key` gives the last.
    let mut all: Vec<_> = stages(layer_bytes.len(), num_stages).collect();
    all.reverse();
    all.into_iter().max_by_key(bytes).unwrap_or(0..0)
}
