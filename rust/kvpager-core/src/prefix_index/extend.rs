//! Inserting blocks below a pinned node.

use super::evictor::MAX_PIECE;
use super::namespace::Namespace;
use super::order::Order;
use super::tree::{Tree, run_length};
use super::{Pin, PrefixIndex, lock};
use crate::error::{Error, Result};
use crate::ids::BlockHandle;
use std::sync::Arc;

/// What an [`PrefixIndex::extend`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extended {
    /// Leading blocks that are now the index's. The caller keeps the rest.
    pub num_indexed: usize,
    /// How many of those were there already, so that the caller's copy was released for them.
    pub num_duplicates: usize,
}

impl PrefixIndex {
    /// Inserts whole blocks below the pinned prefix and moves the pin to the new deepest node.
    ///
    /// `blocks` are exclusively held by the caller and pass to the index. Where the content is resident
    /// already, the caller's copy is released and `blocks[i]` becomes the resident block: the caller re-points
    /// its table. It stops early, with a smaller `num_indexed`, where a duplicate cannot be traded now because
    /// a step is open or there is no capacity; the caller keeps the rest and may try again.
    ///
    /// # Errors
    /// `InvalidArgument` if `tokens` is not whole blocks for `blocks`, or if the pin is another index's; `WrongState` if no
    /// layer group of the index's model sees all tokens;
    /// `InvalidHandle` if the first piece names a block that the caller does not hold exclusively. Nothing is
    /// changed then. (A bad handle later ends the call early, without an error.)
    pub fn extend(
        self: &Arc<Self>,
        pin: &mut Pin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        self.check_has_blocks()?;
        if self.namespaces.get(pin.namespace)?.is_public {
            return Err(Error::invalid("only publish inserts into a public scope"));
        }
        self.extend_any(pin, tokens, blocks)
    }

    /// [`PrefixIndex::extend`] whatever the scope.
    pub(super) fn extend_any(
        self: &Arc<Self>,
        pin: &mut Pin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        self.check_extend(pin, tokens, blocks)?;
        let namespace = self.namespaces.get(pin.namespace)?;
        let block_size = self.config.block_size as usize;
        let mut done = Extended::default();
        for (tokens, blocks) in tokens.chunks(MAX_PIECE * block_size).zip(blocks.chunks_mut(MAX_PIECE)) {
            let piece = match self.extend_piece(namespace, pin, tokens, blocks) {
                Ok(piece) => piece,
                Err(error) if done.num_indexed == 0 => return Err(error),
                Err(_) => break,
            };
            done.num_indexed += piece.num_indexed;
            done.num_duplicates += piece.num_duplicates;
            if piece.num_indexed < blocks.len() {
                break;
            }
        }
        if let (Some(learned), Some(learner)) = (&self.learned, &namespace.learner) {
            let indexed = tokens.chunks_exact(block_size).take(done.num_indexed);
            pin.history.digest =
                indexed.fold(pin.history.digest, |digest, block| learned.hash.chain(digest, block));
            lock(learner).begin(&mut pin.history);
        }
        Ok(done)
    }

    pub(super) fn check_own(self: &Arc<Self>, pin: &Pin) -> Result<()> {
        if Arc::ptr_eq(self, &pin.index) {
            return Ok(());
        }
        Err(Error::invalid("the pin belongs to another index"))
    }

    fn check_extend(self: &Arc<Self>, pin: &Pin, tokens: &[u32], blocks: &[BlockHandle]) -> Result<()> {
        self.check_own(pin)?;
        let expected = blocks.len() * self.config.block_size as usize;
        if tokens.len() != expected {
            let (blocks, wanted) =
                (crate::count_of(blocks.len(), "block"), crate::count_of(expected, "token"));
            return Err(Error::invalid(format!("for {blocks} {wanted} are needed, got {}", tokens.len())));
        }
        Ok(())
    }

    fn extend_piece(
        &self,
        namespace: &Namespace,
        pin: &mut Pin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        let mut tree = namespace.write_tree();
        let mut order = namespace.lock_order();
        let num_duplicates = match self.adopt(namespace, &mut tree, &mut order, pin, tokens, blocks) {
            Ok(Some(num_duplicates)) => num_duplicates,
            Ok(None) => return Ok(Extended::default()),
            Err(error) => return Err(error),
        };
        let new = &blocks[num_duplicates..];
        let new_tokens = &tokens[num_duplicates * self.config.block_size as usize..];
        let appended = self.append(namespace, &mut tree, &mut order, pin, new_tokens, new);
        self.merge_seams(&mut tree, &mut order, 1);
        match appended {
            Ok(()) => Ok(Extended { num_indexed: blocks.len(), num_duplicates }),
            Err(error) if num_duplicates == 0 => Err(error),
            Err(_) => Ok(Extended { num_indexed: num_duplicates, num_duplicates }),
        }
    }

    /// Moves the pin down over blocks that are resident already, trading the caller's copies for them.
    /// `None` if they cannot be traded now.
    fn adopt(
        &self,
        namespace: &Namespace,
        tree: &mut Tree,
        order: &mut Order,
        pin: &mut Pin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Option<usize>> {
        let view = self.view();
        let mut resident = Vec::new();
        let place = tree.walk(&view, pin.node, tokens, &mut resident);
        if place.num_blocks == 0 {
            return Ok(Some(0));
        }
        let mut target = place.node;
        if place.is_partial {
            target = tree.split(&view, place.node, place.offset);
            order.split(place.node, target);
        }
        let own = &blocks[..place.num_blocks];
        match self.tree_pool().trade_held(namespace.account, own, tree.unheld_blocks(target)) {
            Ok(()) => {}
            Err(Error::WrongState(_) | Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        tree.hold_path(target, |id| order.leave(id));
        let num_unheld = tree.release_path(pin.node, |_, _| {});
        debug_assert_eq!(num_unheld, 0, "its held child holds it, or it is a root");
        blocks[..place.num_blocks].copy_from_slice(&resident);
        pin.node = target;
        pin.is_own_node = false;
        pin.num_blocks += place.num_blocks as u32;
        Ok(Some(place.num_blocks))
    }

    /// Appends blocks that are not resident: in place if the pin is the only one on a leaf, else as a child.
    fn append(
        &self,
        namespace: &Namespace,
        tree: &mut Tree,
        order: &mut Order,
        pin: &mut Pin,
        tokens: &[u32],
        blocks: &[BlockHandle],
    ) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        self.tree_pool().index_blocks(blocks)?;
        let (mut rest, mut rows) = (blocks, tokens);
        while let Some(first) = rest.first() {
            let run = run_length(rest);
            let (written, others) = rows.split_at(run * self.config.block_size as usize);
            // SAFETY: `tree` is borrowed exclusively from its lock; the pool has just accepted the blocks as
            // indexed, which it does once, so no tree has them.
            unsafe { self.arena().write_rows(first.id(), run, written) };
            (rest, rows) = (&rest[run..], others);
        }
        if let Some(events) = self.events() {
            events.stored((pin.namespace, namespace), tree, pin.node, blocks, tokens);
        }
        let num_blocks = blocks.len() as u32;
        // `learned` keeps the ends of earlier requests apart: they may turn out to be branching points.
        let may_grow = pin.is_own_node || self.learned.is_none();
        if may_grow && tree.is_own_leaf(pin.node) {
            tree.append(pin.node, blocks);
        } else {
            let child = tree.add_child(&self.view(), pin.node, blocks.to_vec());
            order.add(child);
            pin.node = child;
            pin.is_own_node = true;
        }
        pin.num_blocks += num_blocks;
        Ok(())
    }
}
