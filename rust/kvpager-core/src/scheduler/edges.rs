//! Decodes at the edge of a block: those of a step take their next block together, and hand the full one to the index
//! together. Alone, each would pay for locks and exchanges that one call can make for all.

use super::core::{Core, draw};
use crate::ids::{BlockHandle, NamespaceId};
use crate::prefix_index::{ChainPin, MAX_PIECE, PrefixIndex};
use crate::{Error, Result};
use std::sync::Arc;

impl Core {
    /// Plans the decodes in `edges`, each of which needs one more block: together if there is room for all, else one by
    /// one, oldest first.
    pub(super) fn cross_edges(&mut self, budget: &mut u32) -> Result<()> {
        if self.edges.is_empty() {
            return Ok(());
        }
        let mut edges = std::mem::take(&mut self.edges);
        let tenant_of = |&position: &u32| self.running[position as usize].request.tenant.index;
        if edges[1..].iter().any(|position| tenant_of(position) != tenant_of(&edges[0])) {
            edges.sort_unstable_by_key(|position| (tenant_of(position), *position));
        }
        let mut alone = std::mem::take(&mut self.alone);
        let mut rest = &mut edges[..];
        while let Some(first) = rest.first() {
            let tenant = self.running[*first as usize].request.tenant.index;
            let is_of_it = |&&position: &&u32| self.running[position as usize].request.tenant.index == tenant;
            let (of_tenant, others) = rest.split_at_mut(rest.iter().take_while(is_of_it).count());
            if self.grow_together(of_tenant)? {
                *budget -= of_tenant.len() as u32;
            } else {
                alone.extend(of_tenant.iter().map(|&position| self.running[position as usize].id));
            }
            rest = others;
        }
        edges.clear();
        self.edges = edges;
        alone.sort_unstable();
        for id in alone.drain(..) {
            // Who is gone gave its blocks to an older one.
            let Some(position) = self.position(id) else { continue };
            if self.grow_or_preempt(position, 1)? {
                let position = self.position_of(id, position);
                self.running[position].num_planned = 1;
                *budget -= 1;
            }
        }
        self.alone = alone;
        Ok(())
    }

    /// Plans decodes of one tenant with one more block for each. False, and nothing has changed, if there is no room for
    /// all of them.
    fn grow_together(&mut self, positions: &mut [u32]) -> Result<bool> {
        let ([first, _, ..], false) = (&*positions, self.config.is_grouped()) else { return Ok(false) };
        let tenant = Arc::clone(&self.running[*first as usize].request.tenant);
        let has_promise = |&position: &u32| self.running[position as usize].reservation.num_blocks() > 0;
        let num_promised = positions.iter().filter(|position| has_promise(position)).count();
        if num_promised > 0 && num_promised < positions.len() {
            positions.sort_unstable_by_key(|position| (!has_promise(position), *position));
        }
        let mut purse = match self.pool.reserve(tenant.account, (positions.len() - num_promised) as u32) {
            Ok(purse) => purse,
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        let (promised, _) = positions.split_at(num_promised);
        for &position in promised {
            self.running[position as usize].reservation.move_to(1, &mut purse)?;
        }
        self.keep_within_limit(&tenant)?;
        self.scratch.clear();
        self.scratch.resize(positions.len(), BlockHandle::from_bits(0));
        match draw(self.index.as_deref(), &mut purse, &mut self.scratch) {
            Ok(()) => {}
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. }) => {
                for &position in promised {
                    purse.move_to(1, &mut self.running[position as usize].reservation)?;
                }
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        for (&position, &block) in positions.iter().zip(&self.scratch) {
            let sequence = &mut self.running[position as usize];
            sequence.blocks.push(block);
            sequence.num_planned = 1;
            self.tables.append(sequence.row, block.id());
        }
        self.note_drawn(tenant.account);
        Ok(true)
    }

    /// Makes the blocks matchable that the decodes in `edges` have filled.
    pub(super) fn index_edges(&mut self) -> Result<()> {
        if self.edges.is_empty() {
            return Ok(());
        }
        let mut edges = std::mem::take(&mut self.edges);
        let Some(index) = self.index.clone() else { return Ok(()) };
        let namespace_of = |&position: &u32| self.namespace_at(position);
        if edges[1..].iter().any(|position| namespace_of(position) != namespace_of(&edges[0])) {
            edges.sort_unstable_by_key(|position| (namespace_of(position), *position));
        }
        let mut rest = &mut edges[..];
        while let Some(Some(namespace)) = rest.first().map(|position| self.namespace_at(*position)) {
            let is_of_it = |&&position: &&u32| self.namespace_at(position) == Some(namespace);
            let most = rest.iter().take(MAX_PIECE).take_while(is_of_it).count();
            let (piece, others) = rest.split_at_mut(most);
            let num_indexed = self.index_leaves(&index, namespace, piece)?;
            for &position in &piece[num_indexed..] {
                self.index_full_blocks(position as usize, 1)?;
            }
            rest = others;
        }
        edges.clear();
        self.edges = edges;
        Ok(())
    }

    fn namespace_at(&self, position: u32) -> Option<NamespaceId> {
        self.running[position as usize].pin.as_ref().map(ChainPin::last)
    }

    /// Hands the full blocks of some sequences of a namespace to the index, of those that have a leaf of the tree for
    /// themselves. They come first in `positions` then; returns how many they are.
    fn index_leaves(
        &mut self,
        index: &PrefixIndex,
        namespace: NamespaceId,
        positions: &mut [u32],
    ) -> Result<usize> {
        let Some(mut leaves) = index.leaves(namespace)? else { return Ok(0) };
        let block_size = self.config.block_size as usize;
        let mut num_leaves = 0;
        self.scratch.clear();
        for i in 0..positions.len() {
            let sequence = &self.running[positions[i] as usize];
            let place = sequence.num_indexed as usize;
            let is_next = sequence.num_computed as usize == (place + 1) * block_size
                && sequence.num_shared <= sequence.num_indexed
                && sequence.request.items.is_empty();
            if is_next && sequence.pin.as_ref().is_some_and(|pin| leaves.has(pin)) {
                self.scratch.push(sequence.blocks[place]);
                positions.swap(i, num_leaves);
                num_leaves += 1;
            }
        }
        if !leaves.take(&self.scratch) {
            return Ok(0);
        }
        for (&position, &block) in positions[..num_leaves].iter().zip(&self.scratch) {
            let sequence = &mut self.running[position as usize];
            let Some(pin) = &mut sequence.pin else { continue };
            let start = sequence.num_indexed as usize * block_size;
            leaves.append(pin, &sequence.tokens[start..start + block_size], block);
            sequence.num_indexed += 1;
        }
        Ok(num_leaves)
    }
}
