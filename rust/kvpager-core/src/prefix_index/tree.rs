//! The structure of one namespace: nodes of whole blocks, found by their first block.

use super::child_hash::ChildHash;
use super::merging::Seams;
use super::roots::Roots;
use super::token_arena::{TokenArena, same_tokens};
use crate::ids::BlockHandle;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use hashbrown::HashTable;

/// One compressed edge with the node at its end. A cache line, so that a visit misses once.
#[repr(align(64))]
pub(super) struct Node {
    /// The edge's blocks, first to last. Empty for the root and for a vacant slot, never for another node.
    pub(super) blocks: Vec<BlockHandle>,
    /// The node above; of a vacant slot the next vacant one.
    pub(super) parent: u32,
    /// Hash of (parent, first block), by which the table finds this node.
    pub(super) hash: u32,
    /// Nodes whose parent this is.
    pub(super) num_children: u32,
    /// The child that was added last.
    first_child: u32,
    /// The sibling that was added before this one, and the one after.
    next: u32,
    previous: u32,
    /// Pins on it, plus its held children unless it is a root. See [`super::holding`].
    pub(super) holds: AtomicU32,
    /// Whether it was used since the hand of `clock` last passed it.
    pub(super) is_referenced: AtomicBool,
    /// Whether the slot is among the tree's noted seams, whoever has it.
    pub(super) is_seam: bool,
    /// Whether the blocks have consecutive ids, as those that were allocated together have: their rows are one piece of
    /// memory then, and are compared as one without a look at each block.
    pub(super) is_run: bool,
    /// The tree's era when its root was made.
    pub(super) era: u8,
    /// Newest step that may still read what was released; 0 if none.
    pub(super) fence: AtomicU64,
}

#[cfg(not(any(loom, shuttle)))]
const _: () = assert!(size_of::<Node>() == 64);

impl Node {
    /// A node without children and pins.
    pub(super) fn new(blocks: Vec<BlockHandle>, parent: u32, hash: u32) -> Self {
        let (holds, is_referenced, fence) = (AtomicU32::new(0), AtomicBool::new(false), AtomicU64::new(0));
        let (first_child, next, previous) = (NO_NODE, NO_NODE, NO_NODE);
        let is_run = is_run(&blocks);
        Self {
            blocks,
            parent,
            hash,
            num_children: 0,
            first_child,
            next,
            previous,
            holds,
            is_referenced,
            is_seam: false,
            is_run,
            era: 0,
            fence,
        }
    }

    /// Replaces the blocks.
    pub(super) fn set_blocks(&mut self, blocks: Vec<BlockHandle>) {
        self.is_run = is_run(&blocks);
        self.blocks = blocks;
    }
}

/// Where a walk ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The deepest node that took part.
    pub(super) node: u32,
    /// How many of its blocks matched: all, or some if the walk ended inside.
    pub(super) offset: usize,
    /// Whether the walk ended inside the node.
    pub(super) is_partial: bool,
    /// Blocks matched below the start.
    pub(super) num_blocks: usize,
}

/// Nodes of one namespace, addressed by index.
pub(super) struct Tree {
    nodes: Vec<Node>,
    vacant: u32,
    /// Every node but the root, by the hash of its parent and its first block.
    children: HashTable<u32>,
    pub(super) roots: Roots,
    /// Counts how often everything was cut off. Nodes of another era are *stale*: nothing arrives at them. It may come
    /// round while a pin lasts; what that pin lets go waits for an eviction then, as unreachable as before.
    pub(super) era: u8,
    /// Where the hand of `clock` stands.
    pub(super) hand: u32,
    pub(super) seams: Seams,
}

pub(super) const NO_NODE: u32 = u32::MAX;

impl Tree {
    pub(super) fn new() -> Self {
        let root = Node::new(Vec::new(), NO_NODE, 0);
        let (nodes, children, roots) = (vec![root], HashTable::new(), Roots::new(0));
        Self { nodes, vacant: NO_NODE, children, roots, era: 0, hand: 0, seams: Seams::default() }
    }

    /// A node by its index.
    #[inline]
    pub(super) fn node(&self, id: u32) -> &Node {
        &self.nodes[id as usize]
    }

    pub(super) fn node_mut(&mut self, id: u32) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    /// Blocks of a node.
    #[inline]
    pub(super) fn num_blocks(&self, id: u32) -> u32 {
        self.node(id).blocks.len() as u32
    }

    /// Slots, vacant ones included.
    pub(super) fn num_slots(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Whether the slot has a node that is not a root.
    pub(super) fn is_live(&self, id: u32) -> bool {
        !self.node(id).blocks.is_empty()
    }

    /// Whether the node is a leaf that one pin holds.
    pub(super) fn is_own_leaf(&self, id: u32) -> bool {
        self.is_live(id) && self.node(id).num_children == 0 && self.holds(id) == 1
    }

    /// Whether a purge cut the node off.
    pub(super) fn is_stale(&self, id: u32) -> bool {
        self.node(id).era != self.era
    }

    /// Nodes in the table of children, that is all but the roots.
    pub(super) fn num_children(&self) -> usize {
        self.children.len()
    }

    /// Bytes of the node array, the edges and the table.
    pub(super) fn memory_bytes(&self) -> usize {
        let edges: usize = self.nodes.iter().map(|n| n.blocks.capacity() * size_of::<BlockHandle>()).sum();
        self.nodes.capacity() * size_of::<Node>()
            + edges
            + self.children.allocation_size()
            + self.seams.memory_bytes()
    }

    /// Follows `tokens` down from `start` in whole blocks; matched blocks go to `out`.
    pub(super) fn walk(
        &self,
        at: &View<'_>,
        start: u32,
        tokens: &[u32],
        out: &mut Vec<BlockHandle>,
    ) -> Place {
        self.descend(at, start, tokens, |blocks| out.extend_from_slice(blocks))
    }

    /// Blocks that a walk from `start` would match.
    pub(super) fn count_matched(&self, at: &View<'_>, start: u32, tokens: &[u32]) -> usize {
        self.descend(at, start, tokens, |_| {}).num_blocks
    }

    #[inline]
    fn descend(
        &self,
        at: &View<'_>,
        start: u32,
        tokens: &[u32],
        mut matched: impl FnMut(&[BlockHandle]),
    ) -> Place {
        let mut place = Place { node: start, offset: 0, is_partial: false, num_blocks: 0 };
        place.offset = self.node(start).blocks.len();
        let mut rest = tokens;
        while rest.len() >= at.block_size {
            let Some(child) = self.find_child(at, place.node, &rest[..at.block_size]) else { break };
            let blocks = &self.node(child).blocks;
            let equal = 1 + count_equal(at, &blocks[1..], &rest[at.block_size..], self.node(child).is_run);
            matched(&blocks[..equal]);
            place.node = child;
            place.offset = equal;
            place.num_blocks += equal;
            if equal < blocks.len() {
                place.is_partial = true;
                break;
            }
            rest = &rest[equal * at.block_size..];
        }
        place
    }

    fn find_child(&self, at: &View<'_>, parent: u32, block: &[u32]) -> Option<u32> {
        if self.node(parent).num_children == 0 {
            return None;
        }
        let hash = at.hash.hash(parent, block);
        let is_child = |&id: &u32| {
            let node = self.node(id);
            node.hash == hash && node.parent == parent && same_tokens(at.row(node.blocks[0]), block)
        };
        self.children.find(ChildHash::spread(hash), is_child).copied()
    }

    /// Makes a node of `blocks`, whose rows are written, below `parent`, from which it takes a pin over.
    pub(super) fn add_child(&mut self, at: &View<'_>, parent: u32, blocks: Vec<BlockHandle>) -> u32 {
        let hash = at.hash.hash(parent, at.row(blocks[0]));
        let era = self.node(parent).era;
        let id = self.occupy(Node { era, ..Node::new(blocks, parent, hash) });
        self.link_child(id);
        // Relaxed: under the exclusive lock. The parent loses the pin and gains a held child: its count stays, unless it
        // is a root.
        self.node(id).holds.store(1, Ordering::Relaxed);
        let above = self.node(parent);
        if above.parent == NO_NODE {
            above.holds.fetch_sub(1, Ordering::Relaxed);
        }
        self.enter(id);
        id
    }

    /// Lengthens a leaf in place.
    pub(super) fn append(&mut self, id: u32, blocks: &[BlockHandle]) {
        debug_assert!(self.is_live(id) && self.node(id).num_children == 0);
        let node = &mut self.nodes[id as usize];
        let follows = |last: &BlockHandle| blocks[0].id().0 == last.id().0.wrapping_add(1);
        node.is_run = node.is_run && node.blocks.last().is_some_and(follows) && is_run(blocks);
        node.blocks.extend_from_slice(blocks);
    }

    /// Cuts a node after `offset` blocks: a new node takes the head, `id` keeps the tail, its children and its
    /// pins. Returns the head.
    pub(super) fn split(&mut self, at: &View<'_>, id: u32, offset: usize) -> u32 {
        self.withdraw(id);
        self.unlink_child(id);
        let node = &mut self.nodes[id as usize];
        debug_assert!(0 < offset && offset < node.blocks.len());
        let tail = node.blocks.split_off(offset);
        let mut head_blocks = std::mem::take(&mut node.blocks);
        node.set_blocks(tail);
        head_blocks.shrink_to_fit();
        let (parent, hash, era) = (node.parent, node.hash, node.era);
        let head = Node { era, ..Node::new(head_blocks, parent, hash) };
        // Relaxed: under the exclusive lock.
        head.holds.store(u32::from(node.holds.load(Ordering::Relaxed) > 0), Ordering::Relaxed);
        head.is_referenced.store(node.is_referenced.load(Ordering::Relaxed), Ordering::Relaxed);
        head.fence.store(node.fence.load(Ordering::Relaxed), Ordering::Relaxed);
        let head = self.occupy(head);
        self.link_child(head);
        self.enter(head);
        let first = self.node(id).blocks[0];
        let hash = at.hash.hash(head, at.row(first));
        let node = &mut self.nodes[id as usize];
        node.parent = head;
        node.hash = hash;
        self.link_child(id);
        self.enter(id);
        self.note_seam(head);
        head
    }

    /// Takes up to `max_blocks` from a leaf's tail, deepest first, and removes the leaf once it is empty.
    pub(super) fn take_tail(&mut self, id: u32, max_blocks: usize, out: &mut Vec<BlockHandle>) -> TailTaken {
        let node = &mut self.nodes[id as usize];
        debug_assert!(!node.blocks.is_empty() && node.num_children == 0);
        let keep = node.blocks.len().saturating_sub(max_blocks);
        let num_blocks = node.blocks.len() - keep;
        if keep > 0 {
            out.extend(node.blocks.drain(keep..).rev());
            return TailTaken { num_blocks, is_removed: false };
        }
        self.withdraw(id);
        let node = &mut self.nodes[id as usize];
        out.extend(std::mem::take(&mut node.blocks).into_iter().rev());
        let parent = node.parent;
        self.unlink_child(id);
        self.vacate(id);
        self.note_seam(parent);
        TailTaken { num_blocks, is_removed: true }
    }

    /// Children of a node, the one added last first.
    pub(super) fn children_of(&self, parent: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |id: u32| (id != NO_NODE).then_some(id);
        std::iter::successors(some(self.node(parent).first_child), move |&id| some(self.node(id).next))
    }

    /// Enters a node among the children of its parent.
    pub(super) fn link_child(&mut self, id: u32) {
        let parent = self.node(id).parent as usize;
        self.nodes[parent].num_children += 1;
        let next = std::mem::replace(&mut self.nodes[parent].first_child, id);
        let node = &mut self.nodes[id as usize];
        (node.next, node.previous) = (next, NO_NODE);
        if next != NO_NODE {
            self.nodes[next as usize].previous = id;
        }
    }

    /// Takes a node out from the children of its parent.
    pub(super) fn unlink_child(&mut self, id: u32) {
        let Node { parent, next, previous, .. } = *self.node(id);
        self.nodes[parent as usize].num_children -= 1;
        if previous == NO_NODE {
            self.nodes[parent as usize].first_child = next;
        } else {
            self.nodes[previous as usize].next = next;
        }
        if next != NO_NODE {
            self.nodes[next as usize].previous = previous;
        }
    }

    /// Gives a slot back.
    pub(super) fn vacate(&mut self, id: u32) {
        let node = &mut self.nodes[id as usize];
        node.parent = self.vacant;
        self.vacant = id;
    }

    pub(super) fn occupy(&mut self, node: Node) -> u32 {
        let id = self.vacant;
        if id == NO_NODE {
            self.nodes.push(node);
            return self.num_slots() - 1;
        }
        let slot = &mut self.nodes[id as usize];
        self.vacant = slot.parent;
        let is_seam = slot.is_seam;
        *slot = Node { is_seam, ..node };
        id
    }

    pub(super) fn enter(&mut self, id: u32) {
        let nodes = &self.nodes;
        let hash = ChildHash::spread(nodes[id as usize].hash);
        self.children.insert_unique(hash, id, |&other| ChildHash::spread(nodes[other as usize].hash));
    }

    pub(super) fn withdraw(&mut self, id: u32) {
        let hash = ChildHash::spread(self.node(id).hash);
        if let Ok(entry) = self.children.find_entry(hash, |&other| other == id) {
            entry.remove();
        }
    }
}

/// What [`Tree::take_tail`] took.
#[derive(Clone, Copy, Debug)]
pub(super) struct TailTaken {
    /// Blocks taken.
    pub(super) num_blocks: usize,
    /// Whether the node is gone.
    pub(super) is_removed: bool,
}

/// What a tree needs of its index to read itself: made only by a holder of the tree's lock.
pub(super) struct View<'a> {
    arena: &'a TokenArena,
    hash: &'a ChildHash,
    block_size: usize,
}

impl<'a> View<'a> {
    /// # Safety
    /// The caller holds the tree's lock for as long as it uses the view, and passes only blocks of that tree.
    pub(super) unsafe fn new(arena: &'a TokenArena, hash: &'a ChildHash, block_size: usize) -> Self {
        Self { arena, hash, block_size }
    }

    #[inline]
    pub(super) fn row(&self, block: BlockHandle) -> &[u32] {
        // SAFETY: whoever made the view holds the tree's lock, and the block is one of that tree's.
        unsafe { self.arena.row(block.id()) }
    }

    #[inline]
    fn rows(&self, first: BlockHandle, num_blocks: usize) -> &[u32] {
        // SAFETY: as for `row`; the caller found the ids of that many blocks of the tree consecutive.
        unsafe { self.arena.rows(first.id(), num_blocks) }
    }
}

/// How many leading blocks have the tokens that follow.
#[inline]
fn count_equal(at: &View<'_>, blocks: &[BlockHandle], tokens: &[u32], is_run: bool) -> usize {
    let limit = blocks.len().min(tokens.len() / at.block_size);
    let mut count = 0;
    while count < limit {
        let run = if is_run { limit - count } else { run_length(&blocks[count..limit]) };
        let expected = &tokens[count * at.block_size..][..run * at.block_size];
        if run >= MIN_RUN && at.rows(blocks[count], run) == expected {
            count += run;
            continue;
        }
        let matched = count_equal_rows(at, &blocks[count..count + run], expected);
        count += matched;
        if matched < run {
            break;
        }
    }
    count
}

/// Rows worth a call of the library's comparison.
const MIN_RUN: usize = 4;

/// How many leading blocks have consecutive ids.
#[inline]
pub(super) fn run_length(blocks: &[BlockHandle]) -> usize {
    1 + blocks.windows(2).take_while(|pair| pair[1].id().0 == pair[0].id().0.wrapping_add(1)).count()
}

fn is_run(blocks: &[BlockHandle]) -> bool {
    run_length(blocks) >= blocks.len()
}

/// [`count_equal`] row by row.
#[inline]
fn count_equal_rows(at: &View<'_>, blocks: &[BlockHandle], tokens: &[u32]) -> usize {
    let expected = tokens.chunks_exact(at.block_size);
    blocks.iter().zip(expected).take_while(|(block, expected)| same_tokens(at.row(**block), expected)).count()
}
