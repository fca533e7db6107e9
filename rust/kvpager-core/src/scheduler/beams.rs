//! Beams: branches of one request that go on from each other between two steps.
//!
//! Who goes on from another takes references to its blocks and uses of what the index has, and leaves its own. All that is
//! left comes back into what is promised to the set before anything is paid from it, so a re-order needs nothing more, also
//! in a full pool, and also if beams swap places.

use super::Scheduler;
use super::core::Core;
use super::group_blocks::{LayerBlocks, rest_tables};
use crate::block_tables::BlockTables;
use crate::ids::{BlockHandle, SequenceId};
use crate::prefix_index::ChainPin;
use crate::{Error, Result};
use hashbrown::HashMap;

impl Scheduler {
    /// Lets beams go on from each other: sequence `sequences[i]` takes over what sequence `parents[i]` has computed and
    /// goes on with `tokens[i]`, which replaces the token that `commit` brought last. Blocks are shared, nothing is
    /// computed again. Between two steps only, for branches of one request and length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for arrays of different lengths, a sequence that is named twice, ones that are not
    /// branches of one request, or that differ in length; [`Error::WrongState`] if a step is open or one of them does not run, or has more than one
    /// token to compute. Nothing has changed then.
    pub fn reorder(&self, sequences: &[SequenceId], parents: &[SequenceId], tokens: &[i32]) -> Result<()> {
        if sequences.len() != parents.len() || sequences.len() != tokens.len() {
            return Err(Error::invalid(format!(
                "{}, {} and {}: there must be as many of each",
                crate::count_of(sequences.len(), "sequence"),
                crate::count_of(parents.len(), "parent"),
                crate::count_of(tokens.len(), "token")
            )));
        }
        if let Some(i) = tokens.iter().position(|&token| token < 0) {
            return Err(Error::invalid(format!("tokens[{i}] is {}, must be 0 to {}", tokens[i], i32::MAX)));
        }
        self.enter()?.reorder(sequences, parents, tokens)
    }
}

/// What a beam takes over from another.
struct Inheritance {
    position: usize,
    parent: usize,
    pin: Option<ChainPin>,
    tokens: Vec<u32>,
    /// What the parent has in `Sequence::blocks`, as far as it is computed.
    blocks: Vec<BlockHandle>,
    num_indexed: u32,
    layers: Option<Box<LayerBlocks>>,
}

impl Core {
    fn reorder(&mut self, sequences: &[SequenceId], parents: &[SequenceId], tokens: &[i32]) -> Result<()> {
        let (beams, from) = self.check_reorder(sequences, parents)?;
        let num_computed = beams.first().map_or(0, |&position| self.running[position].num_computed);
        let moves = beams.iter().zip(&from).filter(|(position, parent)| position != parent);
        let moves = moves.map(|(&position, &parent)| self.inheritance(position, parent));
        let moves = moves.collect::<Result<Vec<_>>>()?;
        self.retain_inherited(&moves)?;
        let is_partial = !num_computed.is_multiple_of(self.config.block_size);
        let uses = self.uses_to_pass(&moves);
        for change in moves {
            self.note_shared(change.parent, self.config.blocks_for(num_computed), is_partial);
            self.inherit(change, is_partial)?;
        }
        if let Some(&first) = beams.first() {
            self.pass_uses(first, uses)?;
        }
        for (&position, &token) in beams.iter().zip(tokens) {
            let sequence = &mut self.running[position];
            sequence.tokens.truncate(num_computed as usize);
            sequence.tokens.push(token as u32);
        }
        Ok(())
    }

    /// What one beam takes over from another.
    fn inheritance(&mut self, position: usize, parent: usize) -> Result<Inheritance> {
        let pin = self.running[parent].pin_again()?;
        let sequence = &self.running[parent];
        let num_computed = sequence.num_computed;
        let end = self.config.blocks_for(num_computed) as usize;
        let prompt = sequence.progress.prompt_tokens;
        let mut layers = self.new_layers(prompt, prompt + sequence.request.max_tokens);
        if let (Some(layers), Some(theirs)) = (&mut layers, &sequence.layers) {
            let (spans, block_size) = (self.config.rest_groups(), self.config.block_size);
            // What it could not let go yet it does not pass on.
            layers.take_after(theirs, |i| spans[i].first_visible(num_computed) / block_size, end);
        }
        Ok(Inheritance {
            position,
            parent,
            pin,
            tokens: sequence.tokens[..num_computed as usize].to_vec(),
            blocks: sequence.blocks[..end].to_vec(),
            num_indexed: sequence.num_indexed,
            layers,
        })
    }

    /// Takes a reference to each block of its own that a beam inherits, all or none.
    fn retain_inherited(&self, moves: &[Inheritance]) -> Result<()> {
        let mut own = Vec::new();
        for Inheritance { blocks, num_indexed, layers, .. } in moves {
            if layers.as_ref().is_none_or(|layers| layers.keeps_first) {
                own.extend_from_slice(&blocks[*num_indexed as usize..]);
            }
            own.extend(layers.iter().flat_map(|layers| layers.own()));
        }
        self.pool.retain(&own)
    }

    /// Uses of what the index has of further groups that beams leave (negative) or begin, by block. Where one leaves what
    /// another begins, its use passes over.
    fn uses_to_pass(&self, moves: &[Inheritance]) -> HashMap<BlockHandle, i64, foldhash::fast::RandomState> {
        let mut uses = HashMap::default();
        for change in moves {
            let left = self.running[change.position].layers.iter().flat_map(|layers| layers.used());
            left.for_each(|block| *uses.entry(block).or_insert(0) -= 1);
            let begun = change.layers.iter().flat_map(|layers| layers.used());
            begun.for_each(|block| *uses.entry(block).or_insert(0) += 1);
        }
        uses
    }

    /// Leaves and begins uses, paid from what is promised to the set.
    fn pass_uses(
        &mut self,
        position: usize,
        uses: HashMap<BlockHandle, i64, foldhash::fast::RandomState>,
    ) -> Result<()> {
        let Some(index) = self.index.clone() else { return Ok(()) };
        let (mut left, mut begun): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        for (block, count) in uses {
            let side = if count < 0 { &mut left } else { &mut begun };
            side.extend(std::iter::repeat_n(block, count.unsigned_abs() as usize));
        }
        if left.is_empty() && begun.is_empty() {
            return Ok(());
        }
        let promise = &mut self.running[position].reservation;
        for block in left {
            let is_left = index.leave_attached(block, promise)?;
            debug_assert!(is_left, "no step is open that may read it");
        }
        for id in self.sets.members(self.running[position].id) {
            if let Some(member) = self.position(id) {
                let spare = self.running[member].take_spare(u32::MAX);
                self.running[member].reservation.put_back(&spare)?;
            }
        }
        let missing = (begun.len() as u32).saturating_sub(self.running[position].reservation.num_blocks());
        self.gather_promise(position, missing)?;
        index.use_again(&begun, &mut self.running[position].reservation)
    }

    /// Gives a beam what it inherits for what it has, except for uses of what the index has of further groups. What it will
    /// need again goes back into what is promised to it: a block of its own that it needs for a copy, all of its own of
    /// further groups, and those that an abandoned step took ahead of what is computed.
    fn inherit(&mut self, change: Inheritance, is_partial: bool) -> Result<()> {
        let needs_copy = is_partial && !self.running[change.position].shares_tail();
        let sequence = &mut self.running[change.position];
        let end = change.blocks.len();
        if sequence.keeps_first() {
            let ahead = sequence.blocks.split_off(end.min(sequence.blocks.len()));
            if !ahead.is_empty() {
                sequence.reservation.put_back(&ahead)?;
            }
            let mut own = sequence.blocks.split_off(sequence.num_indexed as usize);
            if let (true, Some(&tail)) = (needs_copy, own.last())
                && self.pool.is_exclusive(tail)?
            {
                sequence.reservation.put_back(&[tail])?;
                own.pop();
            }
            self.pool.release(&own)?;
        }
        self.leave_layers(change.position)?;
        self.write_inherited(&change);
        let sequence = &mut self.running[change.position];
        sequence.pin = change.pin;
        sequence.num_shared = end as u32;
        sequence.blocks.clear();
        sequence.blocks.extend_from_slice(&change.blocks);
        sequence.num_indexed = change.num_indexed;
        sequence.layers = change.layers;
        sequence.tokens.clear();
        sequence.tokens.extend_from_slice(&change.tokens);
        sequence.special_mut().shares_tail = is_partial;
        sequence.drop_special();
        Ok(())
    }

    /// Lets go of what a beam has of its own in further groups: what nobody else has goes back into its promise.
    fn leave_layers(&mut self, position: usize) -> Result<()> {
        let sequence = &mut self.running[position];
        let Some(layers) = &mut sequence.layers else { return Ok(()) };
        let mut alone = std::mem::take(&mut layers.spare);
        for block in layers.own() {
            if self.pool.is_exclusive(block)? {
                alone.push(block);
            } else {
                self.pool.release(&[block])?;
            }
        }
        sequence.reservation.put_back(&alone)
    }

    /// Writes what a beam inherits into its table rows.
    fn write_inherited(&mut self, change: &Inheritance) {
        let row = self.running[change.position].row;
        let Some(layers) = &change.layers else {
            write_row(&mut self.tables, row, &change.blocks);
            return;
        };
        if layers.keeps_first {
            write_row(&mut self.tables, row, &change.blocks);
        }
        rest_tables(&mut self.tables, &mut self.group_tables, layers.keeps_first)
            .for_each(|tables| tables.clear_row(row));
        self.write_rows(Some(layers), row);
    }

    /// Where the beams and their parents stand, if they can be re-ordered.
    fn check_reorder(
        &self,
        sequences: &[SequenceId],
        parents: &[SequenceId],
    ) -> Result<(Vec<usize>, Vec<usize>)> {
        if let Some(open) = self.open.front() {
            return Err(Error::WrongState(format!(
                "step {} is open: beams are re-ordered between steps",
                open.id
            )));
        }
        let place = |&id: &SequenceId| {
            let position = self.position(id);
            let ready = |&position: &usize| {
                let sequence = &self.running[position];
                // Before its samples or branches have split off, a token of it would be one of its prompt.
                let has_token = sequence.num_outputs() > 0 && sequence.num_unsplit() == 0;
                sequence.ending.is_none() && sequence.remaining() == 1 && has_token
            };
            position.filter(ready).ok_or_else(|| {
                Error::WrongState(format!(
                    "sequence {id} does not run, has no token yet, or more than one to compute"
                ))
            })
        };
        let beams = sequences.iter().map(place).collect::<Result<Vec<_>>>()?;
        let from = parents.iter().map(place).collect::<Result<Vec<_>>>()?;
        for (i, &position) in beams.iter().enumerate() {
            if beams[..i].contains(&position) {
                return Err(Error::invalid(format!("sequence {} is named twice", sequences[i])));
            }
        }
        let Some(&first) = beams.first() else { return Ok((beams, from)) };
        if let (true, Some(epoch)) = (self.config.is_grouped(), self.pool.newest_open_step()) {
            return Err(Error::WrongState(format!(
                "epoch {} of the pool is open: beams of a model with further layer groups are re-ordered when no step \
                 may read their blocks",
                epoch.number()
            )));
        }
        let id = self.running[first].id;
        let mut all = beams.iter().chain(&from).map(|&position| &self.running[position]);
        if let Some(other) = all.find(|other| !self.sets.are_one(other.id, id)) {
            return Err(Error::invalid(format!(
                "sequences {id} and {} are not branches of one request",
                other.id
            )));
        }
        let length = self.running[first].num_computed;
        let mut all = beams.iter().chain(&from).map(|&position| &self.running[position]);
        if let Some(other) = all.find(|other| other.num_computed != length) {
            return Err(Error::invalid(format!(
                "sequence {id} has computed {}, sequence {} has computed {}: beams are of one length",
                crate::count(length, "token"),
                other.id,
                other.num_computed
            )));
        }
        Ok((beams, from))
    }
}

/// Makes a row hold these blocks, from the first column on.
fn write_row(tables: &mut BlockTables, row: u32, blocks: &[BlockHandle]) {
    for (column, block) in blocks.iter().enumerate() {
        if tables.len(row) > column as u32 {
            tables.replace(row, column as u32, block.id());
        } else {
            tables.append(row, block.id());
        }
    }
    tables.truncate(row, blocks.len() as u32);
}
