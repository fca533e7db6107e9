//! `PrefixIndex`.

use super::events::{PyEventBatch, PySnapshot};
use super::identity::{PyFingerprint, PyShareScope, namespace_id};
use super::pinned::{Held, PyMatch};
use super::place::{Pinned, Place, PlaceRef, PyScopeChain};
use super::stats::{PyNamespaceStats, PySaltStats};
use super::tokens::Tokens;
use crate::args::{int, int_of, optional_int};
use crate::arrays::read_ints;
use crate::block_pool::PyBlockPool;
use crate::error::{IntoPyResult, invalid};
use crate::fork::Home;
use crate::kinds::{flag, instance, optional_bytes, optional_instance, sequence, text};
use kvpager_core::block_pool::Quota;
use kvpager_core::prefix_index::{
    self as core, EventConfig, Extended, Fingerprint, IndexConfig, Item, PartialBlock, PrefixIndex,
    check_items,
};
use kvpager_core::{AccountId, BlockHandle};
use numpy::PyArray1;
use pyo3::prelude::*;
use std::sync::{Arc, OnceLock};

const MAX_BLOCK_SIZE: u64 = core::MAX_BLOCK_SIZE as u64;
const MAX_EVENTS: u64 = u64::MAX;

/// Work of more tokens than this is done with the interpreter released.
const MAX_TOKENS_ATTACHED: usize = 4096;

/// Finds reusable prefixes and keeps their blocks.
#[pyclass(name = "PrefixIndex", module = "kvpager", frozen)]
pub(crate) struct PyPrefixIndex {
    pub(crate) inner: Arc<PrefixIndex>,
    block_size: usize,
    /// The account of namespaces that name none. Opened when first needed.
    account: OnceLock<AccountId>,
    home: Home,
}

impl PyPrefixIndex {
    /// The index, refused in a child of the process that made it: another thread may have had its locks.
    pub(crate) fn index(&self) -> PyResult<&Arc<PrefixIndex>> {
        self.home.check()?;
        Ok(&self.inner)
    }

    fn pinned(&self, pin: Pinned, blocks: Vec<BlockHandle>) -> PyMatch {
        PyMatch::new(pin, blocks, self.block_size, self.home)
    }

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
        place: PlaceRef<'_>,
        tokens: &[u32],
        is_whole: bool,
    ) -> kvpager_core::Result<PyMatch> {
        let mut blocks = Vec::with_capacity(tokens.len() / self.block_size);
        let pinned = place.find(&self.inner, tokens, is_whole, &mut blocks)?;
        Ok(self.pinned(pinned, blocks))
    }

    /// Makes a match of what `insert` does with an empty list of blocks, the interpreter released if it is long.
    fn insert_with(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        insert: impl FnOnce(&[u32], &mut Vec<BlockHandle>) -> kvpager_core::Result<(Pinned, usize)> + Send,
    ) -> PyResult<(PyMatch, usize)> {
        let tokens = Tokens::read(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        let insert = || {
            let mut blocks = Vec::with_capacity(tokens.len() / self.block_size);
            let (pinned, num_matched) = insert(tokens, &mut blocks)?;
            Ok((self.pinned(pinned, blocks), num_matched * self.block_size))
        };
        if tokens.len() <= MAX_TOKENS_ATTACHED { insert().py() } else { py.detach(insert).py() }
    }

    /// Inserts the caller's blocks below a match by `insert`.
    fn extend_with<'py>(
        &self,
        py: Python<'py>,
        pinned: &PyMatch,
        tokens: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
        insert: impl FnOnce(&mut Pinned, &[u32], &mut [BlockHandle]) -> kvpager_core::Result<Extended> + Send,
    ) -> PyResult<Inserted<'py>> {
        self.home.check()?;
        let tokens = Tokens::read(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        let bits: Vec<u64> = read_ints(blocks, "blocks")?;
        let mut blocks: Vec<BlockHandle> = bits.into_iter().map(BlockHandle::from_bits).collect();
        let extend = |held: &mut Held| {
            let done = insert(&mut held.pin, tokens, &mut blocks)?;
            held.blocks.extend_from_slice(&blocks[..done.num_indexed]);
            Ok(done)
        };
        let is_short = tokens.len() <= MAX_TOKENS_ATTACHED;
        let done = if is_short { pinned.with(extend)? } else { py.detach(|| pinned.with(extend))? };
        let bits = blocks.into_iter().map(BlockHandle::to_bits).collect();
        Ok((done.num_indexed, done.num_duplicates, PyArray1::from_vec(py, bits)))
    }
}

/// (blocks indexed, how many of them were resident, handles).
type Inserted<'py> = (usize, usize, Bound<'py, PyArray1<u64>>);

#[pymethods]
impl PyPrefixIndex {
    #[new]
    #[pyo3(signature = (pool, *, block_size=16, eviction="lru", event_key=None, event_capacity=65_536,
        event_tokens=false))]
    fn new(
        #[pyo3(from_py_with = instance)] pool: &PyBlockPool,
        #[pyo3(from_py_with = int_of::<1, MAX_BLOCK_SIZE, _>)] block_size: u32,
        #[pyo3(from_py_with = text)] eviction: &str,
        #[pyo3(from_py_with = optional_bytes)] event_key: Option<Vec<u8>>,
        #[pyo3(from_py_with = int_of::<1, MAX_EVENTS, _>)] event_capacity: usize,
        #[pyo3(from_py_with = flag)] event_tokens: bool,
    ) -> PyResult<Self> {
        let config = IndexConfig { block_size, eviction: eviction.parse::<_>().py()? };
        let pool = Arc::clone(pool.here()?);
        let inner = match event_key {
            None => PrefixIndex::new(pool, config).py()?,
            Some(key) => {
                let key = key.try_into().map_err(|key: Vec<u8>| {
                    invalid(format!("event_key must have 32 random bytes, has {}", key.len()))
                })?;
                let events = EventConfig { key, capacity: event_capacity, with_tokens: event_tokens };
                PrefixIndex::with_events(pool, config, events).py()?
            }
        };
        Ok(Self { inner, block_size: block_size as usize, account: OnceLock::new(), home: Home::here() })
    }

    /// Tokens in a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// How many namespaces there are.
    #[getter]
    fn num_namespaces(&self) -> PyResult<u32> {
        Ok(self.index()?.num_namespaces())
    }

    /// The number of (scope, fingerprint): equal for equal pairs, another one if any field differs.
    #[pyo3(signature = (scope, fingerprint=None, *, account=None))]
    fn namespace(
        &self,
        #[pyo3(from_py_with = instance)] scope: &PyShareScope,
        #[pyo3(from_py_with = optional_instance)] fingerprint: Option<&PyFingerprint>,
        #[pyo3(from_py_with = optional_int)] account: Option<u32>,
    ) -> PyResult<u32> {
        let index = self.index()?;
        let absent = Fingerprint::default();
        let fingerprint = fingerprint.map_or(&absent, |fingerprint| &fingerprint.inner);
        let account = account.map_or_else(|| self.default_account(), |id| Ok(AccountId(id))).py()?;
        Ok(index.namespace(&scope.inner, fingerprint, account).py()?.0)
    }

    /// Sets what an account's tenant may observe of others: "open", "scoped" (the default) or "strict".
    fn set_isolation(
        &self,
        #[pyo3(from_py_with = int)] account: u32,
        #[pyo3(from_py_with = text)] isolation: &str,
    ) -> PyResult<()> {
        self.index()?.set_isolation(AccountId(account), isolation.parse().py()?).py()
    }

    /// The level of an account.
    fn isolation(&self, #[pyo3(from_py_with = int)] account: u32) -> PyResult<&'static str> {
        Ok(self.index()?.isolation(AccountId(account)).py()?.name())
    }

    /// A chain of namespaces to look up in order: public, group, private.
    fn chain(&self, namespaces: &Bound<'_, PyAny>) -> PyResult<PyScopeChain> {
        let ids = read_ints::<i64>(namespaces, "namespaces")?
            .into_iter()
            .map(namespace_id)
            .collect::<PyResult<Vec<_>>>()?;
        Ok(PyScopeChain { inner: self.index()?.chain(&ids).py()? })
    }

    /// Pins the longest cached prefix of `tokens`, in a namespace or over a chain.
    #[pyo3(signature = (namespace, tokens, *, whole=false))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        namespace: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = flag)] whole: bool,
    ) -> PyResult<PyMatch> {
        self.home.check()?;
        let place = Place::read(namespace)?;
        let place = place.get();
        let tokens = Tokens::read(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        if tokens.len() <= MAX_TOKENS_ATTACHED {
            return self.match_one(place, tokens, whole).py();
        }
        py.detach(|| self.match_one(place, tokens, whole)).py()
    }

    /// Pins the longest cached prefix of each prompt, with the interpreter released throughout.
    #[pyo3(signature = (namespace, prompts, *, whole=false))]
    fn match_many(
        &self,
        py: Python<'_>,
        namespace: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = sequence)] prompts: Vec<Bound<'_, PyAny>>,
        #[pyo3(from_py_with = flag)] whole: bool,
    ) -> PyResult<Vec<PyMatch>> {
        self.home.check()?;
        let place = Place::read(namespace)?;
        let place = place.get();
        let prompts: Vec<Tokens<'_>> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| Tokens::read(prompt, format_args!("prompts[{i}]")))
            .collect::<PyResult<_>>()?;
        let prompts: Vec<&[u32]> = prompts.iter().map(Tokens::as_slice).collect::<PyResult<_>>()?;
        let found: kvpager_core::Result<Vec<PyMatch>> =
            py.detach(|| prompts.iter().map(|prompt| self.match_one(place, prompt, whole)).collect());
        found.py()
    }

    /// The block that follows a match and begins most like `tokens`, with how many of them it has.
    fn match_partial(
        &self,
        #[pyo3(from_py_with = instance)] pinned: &PyMatch,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(PyMatch, usize)>> {
        let index = self.index()?;
        let tokens = Tokens::read(tokens, "tokens")?;
        let tokens = tokens.as_slice()?;
        let found = pinned.with(|held| held.pin.match_partial(index, tokens))?;
        Ok(found.map(|PartialBlock { pin, block, num_tokens }| {
            (self.pinned(Pinned::One(pin), vec![block]), num_tokens)
        }))
    }

    /// What the index compares for a prompt with items: its tokens, each item's id at its offset.
    fn key_items<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = super::items)] items: Vec<Item>,
    ) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let mut keys: Vec<u32> = read_ints(tokens, "tokens")?;
        check_items(&items, keys.len()).py()?;
        self.index()?.key_items(&items, 0, &mut keys).py()?;
        Ok(PyArray1::from_vec(tokens.py(), keys))
    }

    /// How many tokens `match_prefix` would find now. Pins and touches nothing.
    fn peek_prefix(
        &self,
        #[pyo3(from_py_with = int)] namespace: i64,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let tokens = Tokens::read(tokens, "tokens")?;
        self.index()?.peek_prefix(namespace_id(namespace)?, tokens.as_slice()?).py()
    }

    /// A match of the empty prefix.
    fn root(&self, #[pyo3(from_py_with = int)] namespace: i64) -> PyResult<PyMatch> {
        let pin = self.index()?.root(namespace_id(namespace)?).py()?;
        Ok(self.pinned(Pinned::One(pin), Vec::new()))
    }

    /// Makes every whole block of `tokens` resident and pins it; returns the match and the tokens found resident.
    fn insert_prefix(
        &self,
        py: Python<'_>,
        namespace: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<(PyMatch, usize)> {
        self.home.check()?;
        let place = Place::read(namespace)?;
        let place = place.get();
        self.insert_with(py, tokens, |tokens, blocks| place.insert(&self.inner, tokens, blocks))
    }

    /// `insert_prefix` in a public namespace: the operator's call.
    fn publish_prefix(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int)] namespace: i64,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<(PyMatch, usize)> {
        self.home.check()?;
        let namespace = namespace_id(namespace)?;
        self.insert_with(py, tokens, |tokens, blocks| {
            let (pin, found) = self.inner.publish_prefix(namespace, tokens, blocks)?;
            Ok((Pinned::One(pin), found))
        })
    }

    /// Inserts whole blocks below a match and moves it to the new deepest node.
    fn extend<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = instance)] pinned: &PyMatch,
        tokens: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
    ) -> PyResult<Inserted<'py>> {
        self.extend_with(py, pinned, tokens, blocks, |pin, tokens, blocks| {
            pin.extend(&self.inner, tokens, blocks)
        })
    }

    /// `extend` below a match in a public namespace: the operator's call.
    fn publish<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = instance)] pinned: &PyMatch,
        tokens: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
    ) -> PyResult<Inserted<'py>> {
        self.extend_with(py, pinned, tokens, blocks, |pin, tokens, blocks| {
            pin.publish(&self.inner, tokens, blocks)
        })
    }

    /// Removes every prefix of a scope; returns the namespaces it has and the blocks evicted at once.
    fn purge(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = instance)] scope: &PyShareScope,
    ) -> PyResult<(usize, usize)> {
        let index = self.index()?;
        let done = py.detach(|| index.purge(&scope.inner));
        Ok((done.num_namespaces, done.num_evicted))
    }

    /// Takes up to `max_events` events, oldest first.
    #[pyo3(signature = (max_events=4096))]
    fn poll_events(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int)] max_events: usize,
    ) -> PyResult<PyEventBatch> {
        let index = self.index()?;
        Ok(PyEventBatch::new(py.detach(|| index.poll_events(max_events))))
    }

    /// Everything that is matchable now, to start following from.
    fn snapshot(&self, py: Python<'_>) -> PyResult<PySnapshot> {
        let index = self.index()?;
        Ok(PySnapshot::new(py.detach(|| index.snapshot())))
    }

    /// Counts of a namespace.
    fn namespace_stats(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int)] namespace: i64,
    ) -> PyResult<PyNamespaceStats> {
        let namespace = namespace_id(namespace)?;
        let index = self.index()?;
        Ok(PyNamespaceStats::new(py.detach(|| index.namespace_stats(namespace)).py()?))
    }

    /// Sets how many namespaces of salts an account may have at once.
    fn set_max_salts(&self, #[pyo3(from_py_with = int)] max_salts: u32) -> PyResult<()> {
        self.index()?.set_max_salts(max_salts);
        Ok(())
    }

    /// Counts of the namespaces that clients' salts made for an account.
    fn salt_stats(&self, #[pyo3(from_py_with = int)] account: u32) -> PyResult<PySaltStats> {
        Ok(PySaltStats::new(self.index()?.salt_stats(AccountId(account)).py()?))
    }

    /// Evicts an account's own cached blocks until `num_blocks` more are within its limit, if it is `strict`.
    fn make_room(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int)] account: u32,
        #[pyo3(from_py_with = int)] num_blocks: u32,
    ) -> PyResult<u32> {
        let index = self.index()?;
        py.detach(|| index.make_room(AccountId(account), num_blocks)).py()
    }

    /// Evicts up to `num_blocks` cached blocks for an account, whose as its level says; returns how many.
    fn reclaim(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int)] account: u32,
        #[pyo3(from_py_with = int)] num_blocks: u32,
    ) -> PyResult<u32> {
        let index = self.index()?;
        py.detach(|| index.evict_for(AccountId(account), num_blocks)).py()
    }

    /// Evicts up to `num_blocks` cached blocks; returns how many.
    fn evict(&self, py: Python<'_>, #[pyo3(from_py_with = int)] num_blocks: u32) -> PyResult<u32> {
        let index = self.index()?;
        Ok(py.detach(|| index.evict(num_blocks)))
    }

    /// Evicts everything that is not held, and forgets the digests of items that nothing has any more.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let index = self.index()?;
        py.detach(|| index.clear());
        Ok(())
    }

    /// Bytes used besides the token rows, the digests of items included.
    #[getter]
    fn memory_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        let index = self.index()?;
        Ok(py.detach(|| index.memory_bytes()))
    }

    /// Raises `AssertionError` with the first violated invariant.
    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        let index = self.index()?;
        py.detach(|| index.check_invariants()).map_err(pyo3::exceptions::PyAssertionError::new_err)
    }
}

/// Keeps the type that crosses threads in one place: a pin may be dropped on any of them.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Pinned>();
};
