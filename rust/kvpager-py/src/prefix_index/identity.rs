//! `Fingerprint` and `ShareScope`: values, compared and hashed by their canonical bytes.

use crate::args::optional_int;
use crate::error::invalid;
use crate::kinds::{
    optional_bytes, optional_number, optional_owned_text, optional_sequence, owned_text, shown,
};
use kvpager_core::prefix_index::{Adapter, Fingerprint, ShareScope};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Everything that must be equal for KV to be reusable.
#[pyclass(name = "Fingerprint", module = "kvpager", frozen, eq)]
#[derive(Clone, PartialEq)]
pub(crate) struct PyFingerprint {
    pub(crate) inner: Fingerprint,
}

#[pymethods]
impl PyFingerprint {
    #[new]
    #[pyo3(signature = (*, model=None, model_revision=None, tokenizer_revision=None, chat_template=None,
        adapters=None, rope_type=None, rope_theta=None, rope_scaling=None, attention_mask=None, window=None,
        kv_dtype=None, kv_scales=None, numerics=None, block_size=None))]
    #[expect(clippy::too_many_arguments, reason = "one keyword a field of the identity")]
    fn new(
        #[pyo3(from_py_with = optional_owned_text)] model: Option<String>,
        #[pyo3(from_py_with = optional_owned_text)] model_revision: Option<String>,
        #[pyo3(from_py_with = optional_owned_text)] tokenizer_revision: Option<String>,
        #[pyo3(from_py_with = optional_owned_text)] chat_template: Option<String>,
        #[pyo3(from_py_with = adapters)] adapters: Option<Vec<Adapter>>,
        #[pyo3(from_py_with = optional_owned_text)] rope_type: Option<String>,
        #[pyo3(from_py_with = optional_number)] rope_theta: Option<f64>,
        #[pyo3(from_py_with = optional_owned_text)] rope_scaling: Option<String>,
        #[pyo3(from_py_with = optional_owned_text)] attention_mask: Option<String>,
        #[pyo3(from_py_with = optional_int)] window: Option<u64>,
        #[pyo3(from_py_with = optional_owned_text)] kv_dtype: Option<String>,
        #[pyo3(from_py_with = optional_owned_text)] kv_scales: Option<String>,
        #[pyo3(from_py_with = optional_owned_text)] numerics: Option<String>,
        #[pyo3(from_py_with = optional_int)] block_size: Option<u64>,
    ) -> Self {
        Self {
            inner: Fingerprint {
                model,
                model_revision,
                tokenizer_revision,
                chat_template,
                adapters,
                rope_type,
                rope_theta,
                rope_scaling,
                attention_mask,
                window,
                kv_dtype,
                kv_scales,
                numerics,
                block_size,
            },
        }
    }

    /// The canonical bytes: equal exactly if the fingerprints are.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.to_bytes())
    }

    fn __hash__(&self) -> u64 {
        hash_of(&self.inner.to_bytes())
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner)
    }
}

/// Who may share a prefix: one tenant, a named group, or everybody by publish.
#[pyclass(name = "ShareScope", module = "kvpager", frozen, eq, hash)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyShareScope {
    pub(crate) inner: ShareScope,
}

#[pymethods]
impl PyShareScope {
    /// One tenant. A salt from the client narrows it further.
    #[staticmethod]
    #[pyo3(signature = (tenant, *, salt=None))]
    fn private(
        #[pyo3(from_py_with = owned_text)] tenant: String,
        #[pyo3(from_py_with = optional_bytes)] salt: Option<Vec<u8>>,
    ) -> Self {
        let inner = match salt {
            None => ShareScope::Private(tenant),
            Some(salt) => ShareScope::Salted { tenant, salt },
        };
        Self { inner }
    }

    /// The members of a group.
    #[staticmethod]
    fn group(#[pyo3(from_py_with = owned_text)] name: String) -> Self {
        Self { inner: ShareScope::Group(name) }
    }

    /// Everybody, by explicit publish.
    #[staticmethod]
    fn public(#[pyo3(from_py_with = owned_text)] name: String) -> Self {
        Self { inner: ShareScope::Public(name) }
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.inner)
    }
}

/// Adapters as Python has them: (digest, scale).
fn adapters(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Adapter>>> {
    let adapter = |item: Bound<'_, PyAny>| match item.extract::<(String, Option<f64>)>() {
        Ok((digest, scale)) => Ok(Adapter { digest, scale }),
        Err(_) => Err(invalid(format!(
            "must be pairs of a digest (str) and a scale (a number or None), has {}",
            shown(&item)
        ))),
    };
    optional_sequence(object)?.map(|items| items.into_iter().map(adapter).collect()).transpose()
}

fn hash_of(bytes: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// The error for a namespace number that is none.
pub(crate) fn namespace_id(number: i64) -> PyResult<kvpager_core::NamespaceId> {
    u32::try_from(number)
        .map(kvpager_core::NamespaceId)
        .map_err(|_| invalid(format!("namespace must be a number from PrefixIndex.namespace, is {number}")))
}
