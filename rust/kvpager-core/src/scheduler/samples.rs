//! Parallel samples and beams: several sequences of one request.
//!
//! A request for `n` samples is one sequence until its prompt is computed. What all of them need is reserved at its
//! admission, in one operation: the prompt, the growth of each, and a block for a copy. The step that ends the prompt
//! samples `n` tokens from its last row; `commit` then makes `n` sequences that share the prompt's blocks, with the
//! ids that follow the request's. From there on each is scheduled, and ends, by itself.

use super::Scheduler;
use super::compartments::compartment_of;
use super::config::SchedulerConfig;
use super::core::Core;
use super::inbox::Inbox;
use super::request::{FinishReason, Request};
use crate::ids::SequenceId;
use crate::prefix_index::ChainPin;
use crate::{Error, Result};

/// Blocks that the samples of a request need beyond what the first one does.
pub(super) fn extra_blocks(config: &SchedulerConfig, request: &Request, prompt_tokens: u32) -> u32 {
    if request.n == 1 {
        return 0;
    }
    let full = prompt_tokens / config.block_size;
    let is_partial = u32::from(!prompt_tokens.is_multiple_of(config.block_size));
    let each = if config.policy.overcommits() {
        is_partial
    } else {
        config.lifetime_blocks(prompt_tokens, request.max_tokens) - full
    };
    (request.n - 1) * each + is_partial
}

/// Checks the number of samples against what can ever be there; `reachable` blocks may be its tenant's.
pub(super) fn check_samples(
    config: &SchedulerConfig,
    request: &Request,
    reachable: u32,
    max_running: u32,
) -> Result<()> {
    let n = request.n;
    if n == 0 {
        return Err(Error::invalid("n is 0, must be at least 1"));
    }
    config.check_forks()?;
    if n > max_running {
        return Err(Error::refused(format!(
            "{}, and {} may run at once",
            crate::count(n, "sample"),
            crate::count(max_running, "sequence")
        )));
    }
    let prompt_tokens = request.prompt.len() as u32;
    let life = u64::from(config.lifetime_blocks(prompt_tokens, request.max_tokens));
    let full = u64::from(prompt_tokens / config.block_size);
    let is_partial = !prompt_tokens.is_multiple_of(config.block_size);
    let need = life + u64::from(n - 1) * (life - full) + u64::from(n > 1 && is_partial);
    if need > u64::from(reachable) {
        return Err(Error::refused(format!(
            "{} of {} and up to {} need {}; tenant {:?} may have {reachable}",
            crate::count(n, "sample"),
            crate::count(prompt_tokens, "prompt token"),
            crate::count(request.max_tokens, "output token"),
            crate::count(need, "block"),
            request.tenant.name
        )));
    }
    Ok(())
}

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
        self.config.check_forks()?;
        self.enter()?.reorder(sequences, parents, tokens)
    }
}

/// What a beam takes over from another.
struct Inheritance {
    position: usize,
    parent: usize,
    pin: Option<ChainPin>,
    tokens: Vec<u32>,
}

impl Core {
    /// Makes the other samples of a request whose prompt was computed; the first one takes its own token afterwards.
    pub(super) fn split_samples(&mut self, position: usize, sampled: &[i32], inbox: &Inbox) -> Result<()> {
        let first = self.running[position].id;
        self.become_plain(position);
        let sequence = &self.running[position];
        let num_computed = sequence.num_computed;
        let is_partial = !num_computed.is_multiple_of(self.config.block_size);
        let mut shared = self.config.blocks_for(num_computed) as usize;
        let growth = self.growth_after(sequence, num_computed / self.config.block_size);
        let queue_steps = sequence.progress.queue_steps;
        let mut position = position;
        for (i, &token) in sampled.iter().enumerate().skip(1) {
            let id = SequenceId(first.0 + i as u64);
            if !inbox.is_live(id) {
                // Aborted while its request was one sequence: it ends here, without a token.
                let request = self.running[position].account(FinishReason::Aborted, None);
                self.ended.push(request.of_sample(i as u32));
                continue;
            }
            let mut pin = None;
            match self.pin_again(position) {
                Ok(again) => pin = again,
                // Its prefix was purged: it computes the prompt by itself.
                Err(Error::WrongState(_)) => shared = 0,
                Err(error) => return Err(error),
            }
            let sequence = &mut self.running[position];
            let own = (sequence.num_indexed as usize).min(shared);
            self.pool.retain(&sequence.blocks[own..shared])?;
            let part = growth.min(sequence.reservation.num_blocks());
            let reservation = sequence.reservation.split(part)?;
            let mut child = self.child_of(position, id, shared, pin, reservation)?;
            child.progress.queue_steps = queue_steps;
            child.progress.branch = i as u32;
            child.ending = child.push_token(token as u32);
            self.sets.join(id, first);
            self.insert_running(Box::new(child));
            position = self.position(first).unwrap_or(position);
            self.running[position].is_branch = true;
        }
        if shared > 0 {
            self.note_shared(position, shared as u32, is_partial);
        }
        if self.pausing.contains(&first) {
            self.pausing.extend((1..sampled.len() as u64).map(|i| SequenceId(first.0 + i)));
        }
        Ok(())
    }

    /// The request has its samples, or will never have them.
    fn become_plain(&mut self, position: usize) {
        let sequence = &mut self.running[position];
        let own = &mut self.compartments[compartment_of(sequence.id)];
        own.num_unforked -= sequence.request.n - 1;
        sequence.request.n = 1;
        sequence.special_mut().is_unforked = false;
        sequence.drop_special();
    }

    fn reorder(&mut self, sequences: &[SequenceId], parents: &[SequenceId], tokens: &[i32]) -> Result<()> {
        let (beams, from) = self.check_reorder(sequences, parents)?;
        let block_size = self.config.block_size;
        let num_computed = beams.first().map_or(0, |&position| self.running[position].num_computed);
        let shared = self.config.blocks_for(num_computed);
        let mut moves = Vec::new();
        for (&position, &parent) in beams.iter().zip(&from).filter(|(position, parent)| position != parent) {
            let pin = self.pin_again(parent)?;
            let tokens = self.running[parent].tokens[..num_computed as usize].to_vec();
            moves.push(Inheritance { position, parent, pin, tokens });
        }
        let inherited: Vec<_> = moves
            .iter()
            .map(|change| {
                let parent = &self.running[change.parent];
                (parent.blocks[..shared as usize].to_vec(), parent.num_indexed)
            })
            .collect();
        for (blocks, num_indexed) in &inherited {
            self.pool.retain(&blocks[*num_indexed as usize..])?;
        }
        let is_partial = !num_computed.is_multiple_of(block_size);
        for (change, (blocks, num_indexed)) in moves.into_iter().zip(inherited) {
            self.note_shared(change.parent, shared, is_partial);
            self.inherit(change, blocks, num_indexed, is_partial)?;
        }
        for (&position, &token) in beams.iter().zip(tokens) {
            let sequence = &mut self.running[position];
            sequence.tokens.truncate(num_computed as usize);
            sequence.tokens.push(token as u32);
        }
        Ok(())
    }

    /// Gives a beam what it inherits for what it has. What it will need again goes back into what is promised to it: a
    /// block of its own that it needs for a copy, and those that an abandoned step took ahead of what is computed.
    fn inherit(
        &mut self,
        change: Inheritance,
        blocks: Vec<crate::ids::BlockHandle>,
        num_indexed: u32,
        is_partial: bool,
    ) -> Result<()> {
        let needs_copy = is_partial && !self.running[change.position].shares_tail();
        let sequence = &mut self.running[change.position];
        let ahead = sequence.blocks.split_off(blocks.len().min(sequence.blocks.len()));
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
        let sequence = &mut self.running[change.position];
        for (column, block) in blocks.iter().enumerate() {
            if self.tables.len(sequence.row) > column as u32 {
                self.tables.replace(sequence.row, column as u32, block.id());
            } else {
                self.tables.append(sequence.row, block.id());
            }
        }
        self.tables.truncate(sequence.row, blocks.len() as u32);
        sequence.pin = change.pin;
        sequence.num_shared = blocks.len() as u32;
        sequence.blocks.clear();
        sequence.blocks.extend_from_slice(&blocks);
        sequence.num_indexed = num_indexed;
        sequence.tokens.clear();
        sequence.tokens.extend_from_slice(&change.tokens);
        sequence.special_mut().shares_tail = is_partial;
        sequence.drop_special();
        Ok(())
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
