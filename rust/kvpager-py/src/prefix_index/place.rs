//! Where a call looks or inserts: one namespace, or a chain of scopes.

use super::identity::namespace_id;
use crate::args::named_int;
use crate::error::invalid;
use crate::kinds::shown;
use kvpager_core::prefix_index::{ChainPin, Extended, PartialBlock, Pin, PrefixIndex, ScopeChain};
use kvpager_core::{BlockHandle, NamespaceId, Result};
use pyo3::prelude::*;
use pyo3::types::PyInt;
use std::sync::Arc;

/// Namespaces of one fingerprint in the order of look-up, the most private one last.
#[pyclass(name = "ScopeChain", module = "kvpager", frozen, eq)]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyScopeChain {
    pub(super) inner: ScopeChain,
}

#[pymethods]
impl PyScopeChain {
    /// The namespaces' numbers, most public first.
    #[getter]
    fn namespaces(&self) -> Vec<u32> {
        self.inner.namespaces().iter().map(|id| id.0).collect()
    }

    fn __repr__(&self) -> String {
        format!("ScopeChain(namespaces={:?})", self.namespaces())
    }
}

/// A namespace's number, or a chain.
pub(super) enum Place<'py> {
    One(NamespaceId),
    Chain(PyRef<'py, PyScopeChain>),
}

impl<'py> Place<'py> {
    pub(super) fn read(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if object.is_exact_instance_of::<PyInt>() {
            return namespace_id(named_int(object, "namespace")?).map(Self::One);
        }
        match object.cast::<PyScopeChain>() {
            Ok(chain) => Ok(Self::Chain(chain.borrow())),
            Err(_) if object.hasattr("__index__")? => {
                namespace_id(named_int(object, "namespace")?).map(Self::One)
            }
            Err(_) => {
                Err(invalid(format!("namespace must be a number or a ScopeChain, is {}", shown(object))))
            }
        }
    }

    /// The same without the interpreter, to work with it released.
    pub(super) fn get(&self) -> PlaceRef<'_> {
        match self {
            Self::One(namespace) => PlaceRef::One(*namespace),
            Self::Chain(chain) => PlaceRef::Chain(&chain.inner),
        }
    }
}

/// A borrowed [`Place`].
#[derive(Clone, Copy)]
pub(super) enum PlaceRef<'a> {
    One(NamespaceId),
    Chain(&'a ScopeChain),
}

impl PlaceRef<'_> {
    pub(super) fn find(
        self,
        index: &Arc<PrefixIndex>,
        tokens: &[u32],
        is_whole: bool,
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<Pinned> {
        match (self, is_whole) {
            (Self::One(id), false) => index.match_prefix(id, tokens, blocks).map(Pinned::One),
            (Self::One(id), true) => index.match_whole(id, tokens, blocks).map(Pinned::One),
            (Self::Chain(chain), false) => index.match_chain(chain, tokens, blocks).map(Pinned::of_chain),
            (Self::Chain(chain), true) => {
                index.match_chain_whole(chain, tokens, blocks).map(Pinned::of_chain)
            }
        }
    }

    pub(super) fn insert(
        self,
        index: &Arc<PrefixIndex>,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<(Pinned, usize)> {
        match self {
            Self::One(id) => {
                index.insert_prefix(id, tokens, blocks).map(|(pin, found)| (Pinned::One(pin), found))
            }
            Self::Chain(chain) => {
                index.insert_chain(chain, tokens, blocks).map(|(pin, found)| (Pinned::of_chain(pin), found))
            }
        }
    }
}

/// What an unreleased match holds.
pub(super) enum Pinned {
    One(Pin),
    /// Apart: it is rare, and larger than the rest of a match.
    Chain(Box<ChainPin>),
}

impl Pinned {
    fn of_chain(pin: ChainPin) -> Self {
        Self::Chain(Box::new(pin))
    }

    pub(super) fn num_blocks(&self) -> usize {
        match self {
            Self::One(pin) => pin.num_blocks(),
            Self::Chain(pin) => pin.num_blocks(),
        }
    }

    /// Where blocks are inserted.
    pub(super) fn namespace(&self) -> NamespaceId {
        match self {
            Self::One(pin) => pin.namespace(),
            Self::Chain(pin) => pin.last(),
        }
    }

    /// (namespace, blocks) of each part, in order.
    pub(super) fn parts(&self) -> Vec<(u32, usize)> {
        match self {
            Self::One(pin) => vec![(pin.namespace().0, pin.num_blocks())],
            Self::Chain(pin) => pin.parts().map(|(id, num_blocks)| (id.0, num_blocks)).collect(),
        }
    }

    pub(super) fn extend(
        &mut self,
        index: &Arc<PrefixIndex>,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        match self {
            Self::One(pin) => index.extend(pin, tokens, blocks),
            Self::Chain(pin) => index.extend_chain(pin, tokens, blocks),
        }
    }

    pub(super) fn match_partial(
        &self,
        index: &Arc<PrefixIndex>,
        tokens: &[u32],
    ) -> Result<Option<PartialBlock>> {
        match self {
            Self::One(pin) => index.match_partial(pin, tokens),
            Self::Chain(_) => Err(kvpager_core::Error::InvalidArgument(
                "match_partial needs a match of one namespace, not of a chain".into(),
            )),
        }
    }

    pub(super) fn publish(
        &mut self,
        index: &Arc<PrefixIndex>,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        match self {
            Self::One(pin) => index.publish(pin, tokens, blocks),
            Self::Chain(_) => Err(kvpager_core::Error::InvalidArgument(
                "publish needs a match of one public namespace, not of a chain".into(),
            )),
        }
    }
}
