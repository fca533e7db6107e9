//! `PrefixIndex`.

use super::identity::{PyFingerprint, PyShareScope, namespace_id};
use super::pinned::PyMatch;
use super::tokens::Tokens;
use crate::arrays::read_ints;
use crate::block_pool::PyBlockPool;
use crate::error::{IntoPyResult, invalid};
use kvpager_core::block_pool::Quota;
use kvpager_core::prefix_index::{Fingerprint, IndexConfig, Pin, PrefixIndex};
use kvpager_core::{AccountId, BlockHandle, NamespaceId};
use numpy::PyArray1;
use pyo3::prelude::*;
use std::sync::{Arc, OnceLock};

/// Work of more tokens than this is done with the interpreter released.
const MAX_TOKENS_ATTACHED: usize = 4096;

/// Finds reusable prefixes and keeps their blocks.
#[pyclass(name = "PrefixIndex", module = "kvpager", frozen)]
pub(crate) struct PyPrefixIndex {
    pub(crate) inner: Arc<PrefixIndex>,
    block_size: usize,
    /// The account of namespaces that name none. Opened when first needed.
    account: OnceLock<AccountId>,
}

impl PyPrefixIndex {
    fn default_account(&self) -> kvpager_core::Result<AccountId> {
        if let Some(&account) = self.account.get() {
            return Ok(account);
        }
        let pool = self.inner.pool();
        let opened = pool.add_account(Quota { guaranteed: 0, limit: pool.num_blocks() })?;
        Ok(*self.account.get_or_init(|| opened))
    }

    fn match_one(
        &self,
        namespace: NamespaceId,
        tokens: &[u32],
        is_whole: bool,
    ) -> kvpager_core::Result<PyMatch> {
        let mut blocks = Vec::with_capacity(tokens.len() / self.block_size);
        let pin = if is_whole {
            self.inner.match_whole(namespace, tokens, &mut blocks)?
        } else {
            self.inner.match_prefix(namespace, tokens, &mut blocks)?
        };
        Ok(PyMatch::new(pin, blocks, self.block_size))
    }
}

#[pymethods]
impl PyPrefixIndex {
    #[new]
    #[pyo3(signature = (pool, *, block_size=16, eviction="lru"))]
    fn new(pool: &PyBlockPool, block_size: u32, eviction: &str) -> PyResult<Self> {
        let config = IndexConfig { block_size, eviction: eviction.parse::<_>().py()? };
        let inner = PrefixIndex::new(Arc::clone(&pool.inner), config).py()?;
        Ok(Self { inner, block_size: block_size as usize, account: OnceLock::new() })
    }

    /// Tokens in a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// How many namespaces have been interned.
    #[getter]
    fn num_namespaces(&self) -> u32 {
        self.inner.num_namespaces()
    }

    /// The number of (scope, fingerprint): equal for equal pairs, another one if any field differs.
    #[pyo3(signature = (scope, fingerprint=None, *, account=None))]
    fn namespace(
        &self,
        scope: &PyShareScope,
        fingerprint: Option<&PyFingerprint>,
        account: Option<u32>,
    ) -> PyResult<u32> {
        let absent = Fingerprint::default();
        let fingerprint = fingerprint.map_or(&absent, |fingerprint| &fingerprint.inner);
        let account = account.map_or_else(|| self.default_account(), |id| Ok(AccountId(id))).py()?;
        Ok(self.inner.namespace(&scope.inner, fingerprint, account).py()?.0)
    }

    /// Pins the longest cached prefix of `tokens`.
    #[pyo3(signature = (namespace, tokens, *, whole=false))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        namespace: i64,
        tokens: &Bound<'_, PyAny>,
        whole: bool,
    ) -> PyResult<PyMatch> {
        let namespace = namespace_id(namespace)?;
        let tokens = Tokens::read(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        if tokens.len() <= MAX_TOKENS_ATTACHED {
            return self.match_one(namespace, tokens, whole).py();
        }
        py.detach(|| self.match_one(namespace, tokens, whole)).py()
    }

    /// Pins the longest cached prefix of each prompt, with the interpreter released throughout.
    #[pyo3(signature = (namespace, prompts, *, whole=false))]
    fn match_many(
        &self,
        py: Python<'_>,
        namespace: i64,
        prompts: Vec<Bound<'_, PyAny>>,
        whole: bool,
    ) -> PyResult<Vec<PyMatch>> {
        let namespace = namespace_id(namespace)?;
        let prompts: Vec<Tokens<'_>> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| Tokens::read(prompt, &format!("prompts[{i}]")))
            .collect::<PyResult<_>>()?;
        let prompts: Vec<&[u32]> = prompts.iter().map(Tokens::as_slice).collect::<PyResult<_>>()?;
        let found: kvpager_core::Result<Vec<PyMatch>> =
            py.detach(|| prompts.iter().map(|prompt| self.match_one(namespace, prompt, whole)).collect());
        found.py()
    }

    /// How many tokens `match_prefix` would find now. Pins and touches nothing.
    fn peek_prefix(&self, namespace: i64, tokens: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tokens = Tokens::read(tokens, "tokens")?;
        self.inner.peek_prefix(namespace_id(namespace)?, tokens.as_slice()?).py()
    }

    /// A match of the empty prefix.
    fn root(&self, namespace: i64) -> PyResult<PyMatch> {
        let pin = self.inner.root(namespace_id(namespace)?).py()?;
        Ok(PyMatch::new(pin, Vec::new(), self.block_size))
    }

    /// Makes every whole block of `tokens` resident and pins it; returns the match and the tokens found resident.
    fn insert_prefix(
        &self,
        py: Python<'_>,
        namespace: i64,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<(PyMatch, usize)> {
        let namespace = namespace_id(namespace)?;
        let tokens = Tokens::read(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        let insert = || {
            let mut blocks = Vec::with_capacity(tokens.len() / self.block_size);
            let (pin, num_matched) = self.inner.insert_prefix(namespace, tokens, &mut blocks)?;
            Ok((PyMatch::new(pin, blocks, self.block_size), num_matched * self.block_size))
        };
        if tokens.len() <= MAX_TOKENS_ATTACHED { insert().py() } else { py.detach(insert).py() }
    }

    /// Inserts whole blocks below a match and moves it to the new deepest node.
    fn extend<'py>(
        &self,
        py: Python<'py>,
        pinned: &PyMatch,
        tokens: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
    ) -> PyResult<(usize, usize, Bound<'py, PyArray1<u64>>)> {
        let tokens = Tokens::read(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        let bits: Vec<u64> = read_ints(blocks, "blocks")?;
        let mut blocks: Vec<BlockHandle> = bits.into_iter().map(BlockHandle::from_bits).collect();
        let mut extend = || {
            pinned.with(|held| {
                let done = self.inner.extend(&mut held.pin, tokens, &mut blocks)?;
                held.blocks.extend_from_slice(&blocks[..done.num_indexed]);
                Ok(done)
            })
        };
        let done = if tokens.len() <= MAX_TOKENS_ATTACHED { extend()? } else { py.detach(extend)? };
        let bits = blocks.into_iter().map(BlockHandle::to_bits).collect();
        Ok((done.num_indexed, done.num_duplicates, PyArray1::from_vec(py, bits)))
    }

    /// Evicts up to `num_blocks` cached blocks; returns how many.
    fn evict(&self, py: Python<'_>, num_blocks: i64) -> PyResult<u32> {
        let num_blocks = u32::try_from(num_blocks)
            .map_err(|_| invalid(format!("num_blocks must be from 0 to {}, is {num_blocks}", u32::MAX)))?;
        Ok(py.detach(|| self.inner.evict(num_blocks)))
    }

    /// Evicts everything that is not held.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| self.inner.clear());
    }

    /// Bytes used besides the token rows.
    #[getter]
    fn memory_bytes(&self, py: Python<'_>) -> usize {
        py.detach(|| self.inner.memory_bytes())
    }

    /// Raises `AssertionError` with the first violated invariant.
    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.check_invariants()).map_err(pyo3::exceptions::PyAssertionError::new_err)
    }
}

/// Keeps the type that crosses threads in one place: a pin may be dropped on any of them.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Pin>();
};
