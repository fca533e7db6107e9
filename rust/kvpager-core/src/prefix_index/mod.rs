//! Radix tree over token ids in whole blocks, one root per namespace.
//!
//! A block in the index belongs to it. A match pins the deepest node of the prefix it found, and a node is
//! held while it or any descendant is pinned; everything else is *cached* and can be evicted, all of it, from
//! the leaves' tails. The idea, the memory picture and the trade-offs: `docs/notes/prefix-index.md`.
//!
//! # Concurrency
//! Each namespace has its own locks: calls in one never wait for calls in another. Inside a namespace,
//! matches walk side by side and wait only for a writer, which works in pieces of at most 64 blocks. Eviction
//! takes one namespace at a time, in pieces as short. The order of eviction is exact least-recently-released
//! when calls come from one thread.

mod attached;
mod chain;
mod child_hash;
mod clock;
mod encoding;
mod events;
mod evictor;
mod extend;
mod fingerprint;
mod holding;
mod homes;
mod insert;
mod interning;
mod invariants;
mod isolation;
mod items;
mod learned;
mod leaves;
mod matching;
mod merging;
mod namespace;
mod order;
mod partial;
mod pin;
mod purge;
mod roots;
mod scope;
mod stats;
mod token_arena;
mod tree;
mod value_evictor;
mod waiting;

pub use chain::{ChainPin, ScopeChain};
pub use events::{Digest, Event, EventBatch, EventConfig, EventKind, Snapshot};
pub(crate) use evictor::MAX_PIECE;
pub use extend::Extended;
pub use fingerprint::{Adapter, Fingerprint};
pub use interning::SaltStats;
pub use isolation::Isolation;
pub use items::{Item, check_items};
pub use partial::PartialBlock;
pub use pin::Pin;
pub use purge::Purged;
pub use scope::ShareScope;
pub use stats::NamespaceStats;

use crate::block_pool::BlockPool;
use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockHandle, NamespaceId};
use crate::sync::{AtomicU64, Ordering};
use attached::Attached;
use child_hash::ChildHash;
use crossbeam_utils::CachePadded;
use events::Events;
use evictor::{Evictor, Unit, Whose};
use homes::Homes;
use interning::Namespaces;
use items::Items;
use learned::Learner;
use namespace::Namespace;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use token_arena::TokenArena;
use tree::View;

/// How the next block to evict is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionPolicy {
    /// Exact least recently released, leaves first, tail before head.
    #[default]
    Lru,
    /// What is least likely to be used again soon, by what the stream has shown so far.
    Learned,
    /// A hand goes round the leaves and takes those that were not used since it last passed; pins and releases
    /// only count in the nodes and set a mark, without a lock beside the tree's shared one.
    Clock,
}

impl EvictionPolicy {
    /// Lists of unheld nodes that a namespace keeps.
    const fn num_lists(self) -> usize {
        match self {
            Self::Lru => 1,
            Self::Learned => learned::NUM_CLASSES,
            Self::Clock => 0,
        }
    }
}

impl std::str::FromStr for EvictionPolicy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "lru" => Ok(Self::Lru),
            "learned" => Ok(Self::Learned),
            "clock" => Ok(Self::Clock),
            _ => Err(Error::invalid(format!(
                "eviction policy {name:?} is not known; there are: lru, learned, clock"
            ))),
        }
    }
}

/// Settings of an index.
#[derive(Clone, Copy, Debug)]
pub struct IndexConfig {
    /// Tokens in a block.
    pub block_size: u32,
    /// Which cached block goes first.
    pub eviction: EvictionPolicy,
}

/// Most tokens in a block.
pub const MAX_BLOCK_SIZE: u32 = 65_536;

impl IndexConfig {
    /// Refuses what an index over so many blocks would, before a pool of them is built.
    ///
    /// # Errors
    /// As [`PrefixIndex::new`].
    pub fn check_for(&self, num_blocks: u32) -> Result<()> {
        self.check()?;
        TokenArena::check_memory(num_blocks, self.block_size as usize)
    }

    fn check(&self) -> Result<()> {
        match self.block_size {
            1..=MAX_BLOCK_SIZE => Ok(()),
            other => Err(Error::invalid(format!("block_size is {other}, must be 1 to {MAX_BLOCK_SIZE}"))),
        }
    }
}

/// Finds reusable prefixes and keeps their blocks.
pub struct PrefixIndex {
    pool: Arc<BlockPool>,
    config: IndexConfig,
    arena: TokenArena,
    hash: ChildHash,
    namespaces: Namespaces,
    evictor: Evictor,
    /// Counts releases. Only its order in one thread matters. Apart from what matches only read; so is the count of
    /// the index's owners, by the alignment.
    clock: CachePadded<AtomicU64>,
    /// There under the `learned` policy.
    learned: Option<Learned>,
    /// Blocks of further layer groups, if there are any.
    attached: OnceLock<Attached>,
    /// The ids of the tree, if they are not the pool's.
    homes: OnceLock<Homes>,
    /// The stream of events, if it is on.
    events: Option<Events>,
    items: Items,
    /// Key of the digests by which continuations are found. Random, never leaves the index.
    digest_key: [u8; 32],
    /// How often something was purged.
    num_purges: AtomicU64,
}

/// The learners, and the key of their digests.
struct Learned {
    /// Learns from everybody who is not `strict`.
    shared: Arc<Mutex<Learner>>,
    /// Those of `strict` accounts, which learn from their own past only.
    own: Mutex<HashMap<AccountId, Arc<Mutex<Learner>>>>,
    hash: ChildHash,
}

impl Learned {
    fn new(block_size: usize) -> Self {
        let learner = Arc::new(Mutex::new(Learner::new()));
        Self { shared: learner, own: Mutex::default(), hash: ChildHash::keyed(block_size) }
    }

    /// The learner of an account.
    fn of(&self, account: AccountId) -> Arc<Mutex<Learner>> {
        let own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(own.get(&account).unwrap_or(&self.shared))
    }

    /// Gives a `strict` account a learner of its own.
    fn set_apart(&self, account: AccountId) {
        let learner = Arc::new(Mutex::new(Learner::new()));
        self.own.lock().unwrap_or_else(PoisonError::into_inner).insert(account, learner);
    }

    /// Digest of the empty prefix of a namespace: equal tokens of two namespaces have nothing in common.
    fn start(namespace: NamespaceId) -> u64 {
        (u64::from(namespace.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

fn lock(learner: &Mutex<Learner>) -> MutexGuard<'_, Learner> {
    learner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PrefixIndex {
    /// An empty index over the blocks of `pool`.
    ///
    /// # Errors
    /// `InvalidArgument` if the block size is zero or above [`MAX_BLOCK_SIZE`], or if the token ids of the pool's
    /// blocks are more than the machine's memory.
    pub fn new(pool: Arc<BlockPool>, config: IndexConfig) -> Result<Arc<Self>> {
        config.check()?;
        let hash = ChildHash::keyed(config.block_size as usize);
        Self::with_parts(pool, config, hash, None)
    }

    /// An index that tells followers what happens to it. Costs a digest a block inserted and 36 bytes a block.
    ///
    /// # Errors
    /// As [`PrefixIndex::new`]; `InvalidArgument` for a buffer of no events.
    pub fn with_events(pool: Arc<BlockPool>, config: IndexConfig, events: EventConfig) -> Result<Arc<Self>> {
        config.check()?;
        if events.capacity == 0 {
            return Err(Error::invalid("the event buffer must hold at least 1 event, holds 0"));
        }
        let events = Events::new(events, pool.num_blocks())?;
        let hash = ChildHash::keyed(config.block_size as usize);
        Self::with_parts(pool, config, hash, Some(events))
    }

    /// Takes up to `max_events` events, oldest first. None if the stream is off.
    pub fn poll_events(&self, max_events: usize) -> EventBatch {
        self.events().map_or_else(EventBatch::default, |events| events.poll(max_events))
    }

    /// Everything that is matchable now, to start following from. Empty if the stream is off.
    ///
    /// # Concurrency
    /// Keeps all writers waiting while it reads: for the start of a follower, not for every step.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        let Some(events) = self.events() else { return snapshot };
        let namespaces: Vec<_> = self.namespaces.all().collect();
        // Every tree is read-locked before the number is read, and what is attached is locked: no event is between the
        // two. Nobody waits for a tree's lock while having another, so the order does not matter.
        let trees: Vec<_> = namespaces.iter().map(|(_, namespace)| namespace.read_tree()).collect();
        let attached = self.lock_attached();
        snapshot.next = events.next();
        snapshot.attached = self.announced(attached.as_deref()).collect();
        for (&(id, namespace), tree) in namespaces.iter().zip(&trees) {
            events.describe(id, namespace, tree, &mut snapshot);
        }
        snapshot
    }

    /// An index whose internal hash is a constant. Every answer is the same, only slower: the tests' proof that
    /// no collision can matter.
    ///
    /// # Errors
    /// As [`PrefixIndex::new`].
    #[doc(hidden)]
    pub fn with_constant_hash(pool: Arc<BlockPool>, config: IndexConfig) -> Result<Arc<Self>> {
        Self::with_parts(pool, config, ChildHash::Constant, None)
    }

    fn with_parts(
        pool: Arc<BlockPool>,
        config: IndexConfig,
        hash: ChildHash,
        events: Option<Events>,
    ) -> Result<Arc<Self>> {
        config.check()?;
        let arena = TokenArena::new(pool.num_blocks(), config.block_size as usize)?;
        let is_learned = config.eviction == EvictionPolicy::Learned;
        let learned = is_learned.then(|| Learned::new(config.block_size as usize));
        let namespaces = Namespaces::new(config.eviction.num_lists());
        let items = Items::new(pool.num_blocks());
        let (evictor, clock) = (Evictor::new(), CachePadded::new(AtomicU64::new(1)));
        Ok(Arc::new(Self {
            pool,
            config,
            arena,
            hash,
            namespaces,
            evictor,
            clock,
            learned,
            events,
            items,
            attached: OnceLock::new(),
            homes: OnceLock::new(),
            digest_key: random_key(),
            num_purges: AtomicU64::new(0),
        }))
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> IndexConfig {
        self.config
    }

    /// The pool whose blocks it keeps.
    #[must_use]
    pub fn pool(&self) -> &Arc<BlockPool> {
        &self.pool
    }

    /// Evicts up to `num_blocks` cached blocks, in the order of the policy; returns how many. In a model of several layer
    /// groups they may be more by what is attached to the last of them.
    ///
    /// # Complexity
    /// Constant per block, and the logarithm of the number of namespaces per change of namespace. Under `clock` also
    /// a visit to each node that the hand passes.
    pub fn evict(&self, num_blocks: u32) -> u32 {
        self.evict_of(Whose::Everyone, num_blocks)
    }

    fn evict_of(&self, whose: Whose, num_blocks: u32) -> u32 {
        let num_blocks = num_blocks as usize;
        let left_behind = self.evict_attached(whose, num_blocks, false);
        let done = left_behind + self.evict_nodes(Unit::Blocks, whose, num_blocks - left_behind);
        (done + self.evict_attached(whose, num_blocks.saturating_sub(done), true)) as u32
    }

    /// Evicts nodes in the order of the policy until there are `count` blocks, or homes.
    fn evict_nodes(&self, unit: Unit, whose: Whose, count: usize) -> usize {
        match &self.learned {
            None if self.config.eviction == EvictionPolicy::Clock => {
                self.evictor.evict_by_clock(self, unit, whose, count)
            }
            None => self.evictor.evict(self, unit, whose, count),
            Some(learned) => {
                let values = |account| lock(&learned.of(account)).values();
                self.evictor.evict_by_value(self, unit, whose, count, &values)
            }
        }
    }

    /// Evicts everything that is not held, and forgets the digests of items that nothing has any more.
    pub fn clear(&self) {
        self.evict(u32::MAX);
        self.forget_items();
    }

    /// Bytes used besides the token rows, digests of items included.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let of_namespace = |(_, namespace): (NamespaceId, &Namespace)| {
            let tree = namespace.read_tree().memory_bytes();
            tree + namespace.lock_order().memory_bytes()
        };
        self.namespaces.all().map(of_namespace).sum::<usize>() + self.items.memory_bytes()
    }

    /// A tree's way to read itself. Only for holders of a tree's lock, which is every caller in this module.
    fn view(&self) -> View<'_> {
        // SAFETY: views are made after a tree's lock was taken and dropped before it is let go, and are given
        // only that tree's blocks (`matching`, `extend`, `items` and `invariants`, each right below its lock).
        unsafe { View::new(self.arena(), &self.hash, self.config.block_size as usize) }
    }

    /// Gives blocks that were taken out of a namespace back to the pool; returns how many blocks of the device are free
    /// by that, those that were attached to them included. The caller has its tree's lock.
    fn evicted(&self, (id, namespace): (NamespaceId, &Namespace), blocks: &[BlockHandle]) -> usize {
        let num_attached = self.evict_homes(blocks);
        if let Some(events) = self.events() {
            events.removed((id, namespace), blocks);
        }
        let evicted = self.tree_pool().evict_own(blocks);
        debug_assert!(evicted.is_ok(), "unheld blocks of the index can be evicted: {evicted:?}");
        num_attached + if self.has_homes() { 0 } else { blocks.len() }
    }

    /// The stream of events, if it is on. It never is with `--cfg eventless`, in which nothing of it is built:
    /// `benches/python/events_off.py` counts what having it off costs.
    #[inline]
    fn events(&self) -> Option<&Events> {
        if cfg!(eventless) { None } else { self.events.as_ref() }
    }

    /// The tick of a release.
    fn tick(&self) -> u64 {
        // Relaxed: pairs with nothing. Stamps order releases; those of one namespace are taken under its
        // order lock, and between namespaces an exact order is promised for one thread only.
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

/// 256 bits from the standard library's source of random hash keys.
fn random_key() -> [u8; 32] {
    let mut key = [0; 32];
    for (i, word) in key.chunks_exact_mut(8).enumerate() {
        // A state of its own for each word: each draws fresh keys or counts them up.
        word.copy_from_slice(&RandomState::new().hash_one(i).to_le_bytes());
    }
    key
}
