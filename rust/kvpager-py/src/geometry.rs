//! Bindings of `kvpager_core::geometry`.

use crate::args::{int, optional_int};
use crate::error::{IntoPyResult, invalid};
use crate::kinds::{number, optional_text, text};
use kvpager_core::geometry as core;
use pyo3::prelude::*;

/// `(span, window, layers, bytes_per_token, padding_bytes_per_token)`.
type GroupRow = (&'static str, Option<u64>, Vec<u32>, u64, u64);

/// `(number, query_heads, kv_heads, key_dim, value_dim, latent)`.
type LayerRow = (u32, u64, u64, u64, u64, bool);

/// `(name, group, item_bytes, shape)`.
type ArrayRow = (&'static str, Option<usize>, u64, (u64, u64));

/// The KV-cache geometry of a deployed model, on the device that holds most of it.
#[pyclass(frozen, module = "kvpager._core")]
pub(crate) struct KvGeometry(core::KvGeometry);

#[pymethods]
impl KvGeometry {
    /// Reads the text of a `config.json`.
    #[staticmethod]
    #[pyo3(signature = (text, *, kv_dtype = "bf16", kv_scales = None, tensor_parallel = 1, pipeline_parallel = 1))]
    fn from_config_json(
        #[pyo3(from_py_with = text)] text: &str,
        #[pyo3(from_py_with = text)] kv_dtype: &str,
        #[pyo3(from_py_with = optional_text)] kv_scales: Option<&str>,
        #[pyo3(from_py_with = int)] tensor_parallel: u64,
        #[pyo3(from_py_with = int)] pipeline_parallel: u64,
    ) -> PyResult<Self> {
        let kv_dtype = core::KvDtype::parse(kv_dtype).py()?;
        let scales = match kv_scales {
            Some(name) => core::KvScales::parse(name).py()?,
            None => kv_dtype.default_scales(),
        };
        let options = core::GeometryOptions { kv_dtype, scales, tensor_parallel, pipeline_parallel };
        core::KvGeometry::from_config_json(text, options).py().map(Self)
    }

    #[getter]
    fn model_type(&self) -> &str {
        &self.0.shape().model_type
    }

    #[getter]
    fn attention(&self) -> &'static str {
        self.0.shape().attention()
    }

    #[getter]
    fn num_layers(&self) -> usize {
        self.0.shape().layers.len()
    }

    #[getter]
    fn num_attention_heads(&self) -> u64 {
        self.0.shape().num_attention_heads
    }

    #[getter]
    fn num_kv_heads(&self) -> Option<u64> {
        self.0.shape().heads().map(|(heads, _)| heads)
    }

    #[getter]
    fn head_dim(&self) -> Option<u64> {
        self.0.shape().heads().map(|(_, dim)| dim)
    }

    #[getter]
    fn hidden_size(&self) -> u64 {
        self.0.shape().hidden_size
    }

    #[getter]
    fn intermediate_size(&self) -> Option<u64> {
        self.0.shape().intermediate_size
    }

    #[getter]
    fn vocab_size(&self) -> Option<u64> {
        self.0.shape().vocab_size
    }

    #[getter]
    fn tensor_parallel(&self) -> u64 {
        self.0.options().tensor_parallel
    }

    #[getter]
    fn max_positions(&self) -> Option<u64> {
        self.0.shape().max_positions
    }

    #[getter]
    fn full_attention_layers(&self) -> usize {
        self.0.shape().layers.iter().filter(|layer| layer.span == core::Span::Full).count()
    }

    #[getter]
    fn windowed_layers(&self) -> usize {
        self.num_layers() - self.full_attention_layers()
    }

    #[getter]
    fn window(&self) -> Option<u64> {
        self.0.shape().layers.iter().find_map(|layer| layer.span.window())
    }

    #[getter]
    fn checkpoint_dtype(&self) -> Option<&str> {
        self.0.shape().checkpoint_dtype.as_deref()
    }

    #[getter]
    fn notes(&self) -> Vec<String> {
        self.0.shape().notes.clone()
    }

    #[getter]
    fn kv_dtype(&self) -> &'static str {
        self.0.options().kv_dtype.name()
    }

    #[getter]
    fn layers_per_device(&self) -> usize {
        self.0.layers_per_device()
    }

    #[getter]
    fn bytes_per_token(&self) -> u64 {
        self.0.bytes_per_token()
    }

    #[getter]
    fn bytes_per_token_beyond_window(&self) -> u64 {
        self.0.bytes_per_token_beyond_window()
    }

    #[getter]
    fn bytes_per_token_all_devices(&self) -> u64 {
        self.0.bytes_per_token_all_devices()
    }

    #[getter]
    fn block_bytes_per_token(&self) -> u64 {
        self.0.block_bytes_per_token()
    }

    /// The groups as `(span, window, layers, bytes_per_token, padding_bytes_per_token)`.
    #[getter]
    fn layer_groups(&self) -> Vec<GroupRow> {
        let row = |group: &core::LayerGroup| {
            let span = group.span;
            let (bytes, padding) = (group.bytes_per_token, group.padding_bytes_per_token);
            (span.name(), span.window(), group.layers.clone(), bytes, padding)
        };
        self.0.groups().iter().map(row).collect()
    }

    /// The layers that keep something, as `(number, query_heads, kv_heads, key_dim, value_dim, latent)`.
    #[getter]
    fn cached_layers(&self) -> Vec<LayerRow> {
        let row = |layer: core::CachedLayer| {
            let heads = (layer.query_heads, layer.kv_heads);
            (layer.number, heads.0, heads.1, layer.key_dim, layer.value_dim, layer.latent)
        };
        self.0.cached_layers().map(row).collect()
    }

    #[getter]
    fn scaled_by_head(&self) -> bool {
        self.0.options().scales == core::KvScales::PerTokenHead
    }

    fn bytes_for_length(&self, #[pyo3(from_py_with = int)] length: u32) -> u64 {
        self.0.bytes_for_length(length.into())
    }

    fn weights_on_device(&self, #[pyo3(from_py_with = int)] total: u64) -> u64 {
        self.0.weights_on_device(total)
    }

    #[pyo3(signature = (length, *, block_size = 16, chunk = 1))]
    fn blocks_for_length(
        &self,
        #[pyo3(from_py_with = int)] length: u32,
        #[pyo3(from_py_with = int)] block_size: u32,
        #[pyo3(from_py_with = int)] chunk: u32,
    ) -> PyResult<u64> {
        if block_size == 0 {
            return Err(invalid("block_size is 0, expected at least 1"));
        }
        Ok(self.0.blocks_for_length(length.into(), block_size.into(), chunk.into()))
    }

    /// The arrays of the largest batch as `(name, group, item_bytes, shape)`.
    #[pyo3(signature = (*, block_size = 16, max_batch_tokens = 8192, max_running = 256, max_model_tokens = None))]
    fn batch_arrays(
        &self,
        #[pyo3(from_py_with = int)] block_size: u32,
        #[pyo3(from_py_with = int)] max_batch_tokens: u32,
        #[pyo3(from_py_with = int)] max_running: u32,
        #[pyo3(from_py_with = optional_int)] max_model_tokens: Option<u32>,
    ) -> PyResult<Vec<ArrayRow>> {
        if block_size == 0 {
            return Err(invalid("block_size is 0, expected at least 1"));
        }
        let limits = core::BatchLimits {
            block_size: block_size.into(),
            max_batch_tokens: max_batch_tokens.into(),
            max_running: max_running.into(),
            max_model_tokens: max_model_tokens.map(u64::from),
        };
        let row = |array: core::BatchArray| (array.name, array.group, array.item_bytes, array.shape);
        Ok(self.0.batch_arrays(limits).into_iter().map(row).collect())
    }

    /// Makes the memory budget; every part is given or estimated.
    #[pyo3(signature = (device_memory, *, device_free = None, device_share = 1.0, weights = None, activations = None,
        workspace = None, split_plans = 0, communication = None, runtime = None, graphs = None, safety_margin = None,
        block_size = 16, max_batch_tokens = 8192, max_running = 256, max_model_tokens = None))]
    #[expect(clippy::too_many_arguments, reason = "one keyword for each part of the budget")]
    fn budget(
        &self,
        #[pyo3(from_py_with = int)] device_memory: u64,
        #[pyo3(from_py_with = optional_int)] device_free: Option<u64>,
        #[pyo3(from_py_with = number)] device_share: f64,
        #[pyo3(from_py_with = optional_int)] weights: Option<u64>,
        #[pyo3(from_py_with = optional_int)] activations: Option<u64>,
        #[pyo3(from_py_with = optional_int)] workspace: Option<u64>,
        #[pyo3(from_py_with = int)] split_plans: u64,
        #[pyo3(from_py_with = optional_int)] communication: Option<u64>,
        #[pyo3(from_py_with = optional_int)] runtime: Option<u64>,
        #[pyo3(from_py_with = optional_int)] graphs: Option<u64>,
        #[pyo3(from_py_with = optional_int)] safety_margin: Option<u64>,
        #[pyo3(from_py_with = int)] block_size: u32,
        #[pyo3(from_py_with = int)] max_batch_tokens: u32,
        #[pyo3(from_py_with = int)] max_running: u32,
        #[pyo3(from_py_with = optional_int)] max_model_tokens: Option<u32>,
    ) -> PyResult<Budget> {
        let input = core::BudgetInput {
            device_memory,
            device_free,
            device_share,
            weights,
            activations,
            workspace,
            split_plans,
            communication,
            runtime,
            graphs,
            safety_margin,
            block_size: block_size.into(),
            max_batch_tokens: max_batch_tokens.into(),
            max_running: max_running.into(),
            max_model_tokens: max_model_tokens.map(u64::from),
        };
        core::Budget::new(&self.0, &input).py().map(Budget)
    }

    fn __repr__(&self) -> String {
        format!(
            "KvGeometry(model_type={:?}, attention={:?}, num_layers={}, bytes_per_token={})",
            self.model_type(),
            self.attention(),
            self.num_layers(),
            self.bytes_per_token()
        )
    }
}

/// A device's memory, part by part.
#[pyclass(frozen, module = "kvpager._core")]
pub(crate) struct Budget(core::Budget);

#[pymethods]
impl Budget {
    /// The parts as `(name, bytes, origin, note)`; their bytes sum to the device's memory.
    #[getter]
    fn parts(&self) -> Vec<(&'static str, u64, &'static str, String)> {
        let row = |part: &core::BudgetPart| (part.name, part.bytes, part.origin.name(), part.note.clone());
        self.0.parts.iter().map(row).collect()
    }

    #[getter]
    fn available(&self) -> u64 {
        self.0.available
    }

    #[getter]
    fn block_bytes(&self) -> u64 {
        self.0.block_bytes
    }

    #[getter]
    fn num_blocks(&self) -> u64 {
        self.0.num_blocks
    }

    #[getter]
    fn max_tokens(&self) -> u64 {
        self.0.max_tokens
    }

    #[getter]
    fn longest_request(&self) -> u64 {
        self.0.longest_request
    }

    fn __repr__(&self) -> String {
        format!("Budget(num_blocks={}, max_tokens={})", self.0.num_blocks, self.0.max_tokens)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<KvGeometry>()?;
    module.add_class::<Budget>()
}
