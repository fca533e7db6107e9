//! Parallel samples: several sequences of one request.
//!
//! A request for `n` samples is one sequence until its prompt is computed. What all of them need is reserved at its
//! admission, in one operation: the prompt, the growth of each, and a block for a copy. The step that ends the prompt
//! samples `n` tokens from its last row; `commit` then makes `n` sequences that share the prompt's blocks, with the
//! ids that follow the request's. From there on each is scheduled, and ends, by itself.

use super::compartments::compartment_of;
use super::config::SchedulerConfig;
use super::core::Core;
use super::inbox::Inbox;
use super::request::{FinishReason, Request};
use crate::ids::SequenceId;
use crate::{Error, Result};

/// Blocks that the samples of a request need beyond what the first one does: in a first group that sees all tokens beyond the
/// prompt's full blocks, with one for a copy; in further groups each as many as a request of its own.
pub(super) fn extra_blocks(config: &SchedulerConfig, request: &Request, prompt_tokens: u32) -> u32 {
    if request.n == 1 {
        return 0;
    }
    if !config.policy.overcommits() {
        return extra_life(config, request, prompt_tokens);
    }
    let is_partial = has_shared_tail(config, prompt_tokens);
    (request.n - 1) * (is_partial + config.rest_after(prompt_tokens)) + is_partial
}

/// The same over the request's life.
pub(super) fn extra_life(config: &SchedulerConfig, request: &Request, prompt_tokens: u32) -> u32 {
    if request.n == 1 {
        return 0;
    }
    let full = if config.keeps_first() { prompt_tokens / config.block_size } else { 0 };
    let each = config.lifetime_blocks(prompt_tokens, request.max_tokens) - full;
    (request.n - 1).saturating_mul(each).saturating_add(has_shared_tail(config, prompt_tokens))
}

/// Whether the prompt ends within a block of the first group that its samples share.
fn has_shared_tail(config: &SchedulerConfig, prompt_tokens: u32) -> u32 {
    u32::from(config.keeps_first() && !prompt_tokens.is_multiple_of(config.block_size))
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
    if n > max_running {
        return Err(Error::refused(format!(
            "{}, and {} may run at once",
            crate::count(n, "sample"),
            crate::count(max_running, "sequence")
        )));
    }
    let prompt_tokens = request.prompt.len() as u32;
    let life = config.lifetime_blocks(prompt_tokens, request.max_tokens);
    let need = life.saturating_add(extra_life(config, request, prompt_tokens));
    if need > reachable {
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

impl Core {
    /// Makes the other samples of a request whose prompt was computed; the first one takes its own token afterwards.
    pub(super) fn split_samples(&mut self, position: usize, sampled: &[i32], inbox: &Inbox) -> Result<()> {
        let first = self.running[position].id;
        self.become_plain(position);
        let sequence = &self.running[position];
        let num_computed = sequence.num_computed;
        let is_partial = !num_computed.is_multiple_of(self.config.block_size);
        let mut shared = self.config.blocks_for(num_computed) as usize;
        let mut most_shared = 0;
        let growth = self.growth_after(sequence, shared as u32);
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
            let mut pin = self.running[position].pin_again()?;
            let sequence = &mut self.running[position];
            let part = growth.min(sequence.reservation.num_blocks());
            let mut promise = sequence.reservation.split(part)?;
            let spare = sequence.take_spare(growth - part);
            if !self.share_blocks(position, shared, &mut promise, spare.len())? {
                (pin, shared) = (None, 0);
            }
            most_shared = most_shared.max(shared);
            let mut child = self.child_of(position, id, shared, pin, promise)?;
            child.give_spare(spare);
            child.progress.queue_steps = queue_steps;
            child.progress.branch = i as u32;
            child.ending = child.push_token(token as u32);
            self.sets.join(id, first);
            self.insert_running(Box::new(child));
            position = self.position(first).unwrap_or(position);
            self.running[position].is_branch = true;
        }
        if most_shared > 0 {
            self.note_shared(position, most_shared as u32, is_partial);
        }
        if self.config.is_grouped() {
            self.settle_promise(position)?;
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
}
