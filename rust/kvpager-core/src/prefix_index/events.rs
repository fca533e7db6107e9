//! What happens to the index, for followers in other processes.
//!
//! A block is named by a keyed 256-bit digest of everything up to its end: `d0 = MAC(key, identity)`,
//! `d = MAC(key, d_before || tokens)`. Whoever does not have the key cannot test guesses of a prompt against the
//! stream. Events are numbered without gaps; when the bounded buffer overflows, all of it is dropped and the
//! follower is told to start from a snapshot again.

use super::chain::chain_digest;
use super::namespace::Namespace;
use super::token_arena::TokenArena;
use super::tree::Tree;
use crate::error::Result;
use crate::ids::{BlockHandle, NamespaceId};
use crate::sync::Ordering;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Keyed digest of a prefix.
pub type Digest = [u8; 32];

/// What stands for a block that no follower knows: its prefix was cleared.
const UNKNOWN: Digest = [0; 32];
/// Of a block's row: its digest, and how often its namespace had been purged when it was stored.
const ROW_WORDS: usize = 9;

/// Settings of the event stream.
#[derive(Clone, Debug)]
pub struct EventConfig {
    /// Secret of the deployment, from the operator. Followers with the same key see the same digests.
    pub key: [u8; 32],
    /// Events kept for a follower that lags behind.
    pub capacity: usize,
    /// Whether stored events carry the blocks' tokens.
    pub with_tokens: bool,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Blocks became matchable, one below the other.
    Stored {
        /// Digest of what they continue; the namespace's own digest for the empty prefix.
        parent: Digest,
        /// Their digests, first to last.
        digests: Vec<Digest>,
        /// Their tokens, if the stream carries them.
        tokens: Vec<u32>,
    },
    /// Blocks are no longer matchable. Children come before parents.
    Removed {
        /// Their digests.
        digests: Vec<Digest>,
    },
    /// Nothing of the namespace is matchable any more.
    Cleared,
    /// A further layer group has its blocks at these of the first group, which are stored. In a model in which no group
    /// sees all tokens, what is stored says where blocks may be, and every group is told of like this.
    Attached {
        /// Position of the group in the model's list.
        group: u32,
        /// Digests of the first group's blocks.
        digests: Vec<Digest>,
    },
    /// A further layer group no longer has its blocks there. Comes before the first group's blocks are removed.
    Detached {
        /// Position of the group in the model's list.
        group: u32,
        /// Digests of the first group's blocks.
        digests: Vec<Digest>,
    },
}

/// One numbered event. The medium is always the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Counts up by one.
    pub number: u64,
    /// Where it happened.
    pub namespace: NamespaceId,
    /// What happened.
    pub kind: EventKind,
}

/// Events in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The events.
    pub events: Vec<Event>,
    /// Whether events were lost before these: what is known is void, start from a snapshot.
    pub must_resync: bool,
}

/// Everything that is matchable at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Number of the first event that is not in it.
    pub next: u64,
    /// (namespace, digest of the parent, digest) of every block, parents before children.
    pub blocks: Vec<(NamespaceId, Digest, Digest)>,
    /// (namespace, digest, group) of every block of the first layer group at which a further one has its own.
    pub attached: Vec<(NamespaceId, Digest, u32)>,
}

/// The stream of one index.
pub(super) struct Events {
    pub(super) config: EventConfig,
    /// Digest of every indexed block, under the same locks as its tokens.
    digests: TokenArena,
    /// Instead of those, once the tree has ids of its own.
    of_homes: OnceLock<TokenArena>,
    buffer: Mutex<Buffer>,
}

#[derive(Default)]
struct Buffer {
    queue: VecDeque<Event>,
    next: u64,
    is_lost: bool,
}

impl Events {
    pub(super) fn new(config: EventConfig, num_blocks: u32) -> Result<Self> {
        let digests = TokenArena::new(num_blocks, ROW_WORDS)?;
        Ok(Self { config, digests, of_homes: OnceLock::new(), buffer: Mutex::default() })
    }

    /// Makes room for so many ids. The caller keeps everybody out of every tree, in which there is nothing.
    pub(super) fn widen(&self, num_homes: u32) -> Result<()> {
        let digests = TokenArena::new(num_homes, ROW_WORDS)?;
        self.of_homes.get_or_init(|| digests);
        Ok(())
    }

    fn digests(&self) -> &TokenArena {
        self.of_homes.get().unwrap_or(&self.digests)
    }

    fn buffer(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, namespace: NamespaceId, kind: EventKind) {
        let mut buffer = self.buffer();
        if buffer.queue.len() >= self.config.capacity {
            buffer.queue.clear();
            buffer.is_lost = true;
        }
        let number = buffer.next;
        buffer.next += 1;
        buffer.queue.push_back(Event { number, namespace, kind });
    }

    pub(super) fn poll(&self, max_events: usize) -> EventBatch {
        let mut buffer = self.buffer();
        let count = buffer.queue.len().min(max_events);
        let events = buffer.queue.drain(..count).collect();
        EventBatch { events, must_resync: std::mem::take(&mut buffer.is_lost) }
    }

    pub(super) fn next(&self) -> u64 {
        self.buffer().next
    }

    /// Digest of a block of the tree whose lock the caller has; `UNKNOWN` if its prefix was cleared since.
    fn digest(&self, namespace: &Namespace, block: BlockHandle) -> Digest {
        let mut digest = UNKNOWN;
        // SAFETY: every caller has the lock of the tree that the block is in, and passes its own blocks only.
        let row = unsafe { self.digests().row(block.id()) };
        if row[ROW_WORDS - 1] != num_purges(namespace) {
            return UNKNOWN;
        }
        for (bytes, word) in digest.chunks_exact_mut(4).zip(row) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        digest
    }

    /// The same, unless no follower knows the block.
    pub(super) fn known(&self, namespace: &Namespace, block: BlockHandle) -> Option<Digest> {
        Some(self.digest(namespace, block)).filter(|digest| *digest != UNKNOWN)
    }

    /// Writes a digest under the exclusive lock of the tree that the block is in.
    fn set_digest(&self, namespace: &Namespace, block: BlockHandle, digest: &Digest) {
        let mut row = [0u32; ROW_WORDS];
        for (word, bytes) in row.iter_mut().zip(digest.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        row[ROW_WORDS - 1] = num_purges(namespace);
        // SAFETY: every caller has the exclusive lock of the tree that the block is in, so nobody reads the row.
        unsafe { self.digests().write_rows(block.id(), 1, &row) };
    }

    /// Digest of a node's end, which blocks below it continue.
    fn end_of(&self, namespace: &Namespace, tree: &Tree, node: u32) -> Digest {
        if let Some(&last) = tree.node(node).blocks.last() {
            return self.digest(namespace, last);
        }
        let seed = *blake3::keyed_hash(&self.config.key, &namespace.names().identity).as_bytes();
        if node == tree.root() {
            return seed;
        }
        tree.key_of(node).map_or(UNKNOWN, |(digest, num_blocks)| {
            let mut hasher = blake3::Hasher::new_keyed(&self.config.key);
            hasher.update(&seed).update(&digest).update(&num_blocks.to_le_bytes());
            *hasher.finalize().as_bytes()
        })
    }

    /// Blocks were inserted below `parent`; the caller has the tree's exclusive lock.
    pub(super) fn stored(
        &self,
        (id, namespace): (NamespaceId, &Namespace),
        tree: &Tree,
        parent: u32,
        blocks: &[BlockHandle],
        tokens: &[u32],
    ) {
        let parent = self.end_of(namespace, tree, parent);
        if parent == UNKNOWN {
            blocks.iter().for_each(|&block| self.set_digest(namespace, block, &UNKNOWN));
            return;
        }
        let mut digest = parent;
        let rows = tokens.chunks_exact(tokens.len() / blocks.len().max(1));
        let chain = |(&block, row): (&BlockHandle, &[u32])| {
            digest = chain_digest(&self.config.key, &digest, row);
            self.set_digest(namespace, block, &digest);
            digest
        };
        let digests = blocks.iter().zip(rows).map(chain).collect();
        let tokens = if self.config.with_tokens { tokens.to_vec() } else { Vec::new() };
        self.push(id, EventKind::Stored { parent, digests, tokens });
    }

    /// Blocks were taken out of the tree whose exclusive lock the caller has.
    pub(super) fn removed(&self, (id, namespace): (NamespaceId, &Namespace), blocks: &[BlockHandle]) {
        let digests: Vec<Digest> = blocks.iter().filter_map(|&block| self.known(namespace, block)).collect();
        if !digests.is_empty() {
            self.push(id, EventKind::Removed { digests });
        }
    }

    /// Everything in a tree, whose exclusive lock the caller has, is about to be cut off: what is stored there by then
    /// is of an earlier purge.
    pub(super) fn cleared(&self, id: NamespaceId) {
        self.push(id, EventKind::Cleared);
    }

    /// Adds what is matchable in a tree whose lock the caller has.
    pub(super) fn describe(&self, id: NamespaceId, namespace: &Namespace, tree: &Tree, out: &mut Snapshot) {
        let mut children = vec![Vec::new(); tree.num_slots() as usize];
        for node in (0..tree.num_slots()).filter(|&node| tree.is_live(node)) {
            children[tree.node(node).parent as usize].push(node);
        }
        let mut open: Vec<u32> = tree.all_roots().collect();
        while let Some(node) = open.pop() {
            let mut parent = self.end_of(namespace, tree, node);
            for child in std::mem::take(&mut children[node as usize]) {
                for &block in &tree.node(child).blocks {
                    let digest = self.known(namespace, block);
                    out.blocks.extend(digest.map(|digest| (id, parent, digest)));
                    parent = digest.unwrap_or(UNKNOWN);
                }
                parent = self.end_of(namespace, tree, node);
                open.push(child);
            }
        }
    }
}

/// How often everything of a namespace was cut off. The caller has its tree's lock.
pub(super) fn num_purges(namespace: &Namespace) -> u32 {
    // Relaxed: changes under the tree's exclusive lock only.
    namespace.num_purges.load(Ordering::Relaxed)
}
