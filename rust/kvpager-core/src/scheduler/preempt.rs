//! When a running sequence cannot grow: the youngest that may be a victim gives its blocks back.
//!
//! Rules (they are what makes every request end):
//! * the oldest running sequence is never a victim, and may take from anybody younger;
//! * others take only from younger ones that sampled a token since their admission, and never from the oldest
//!   of another tenant or from a tenant within its guarantee;
//! * a sequence that finds no victim stalls for a step and keeps what it has.

use super::core::Core;
use super::request::FinishReason;
use crate::{Error, Result};

impl Core {
    /// Gives a running sequence room for `num_tokens` more positions, if need be by preempting others. False:
    /// it has to stall.
    pub(super) fn grow_or_preempt(&mut self, position: usize, num_tokens: u32) -> Result<bool> {
        let end = self.running[position].num_computed + num_tokens;
        loop {
            let short = match self.grow(position, end)? {
                Ok(()) => return Ok(true),
                Err(short) => short,
            };
            if !self.config.policy.overcommits() {
                return Ok(false);
            }
            let Some(victim) = self.victim(position, &short)? else {
                let sequence = &mut self.running[position];
                if self.config.blocks_for(end) > self.pool.reachable(sequence.request.tenant.account)? {
                    sequence.ending = Some(FinishReason::Capacity);
                }
                return Ok(false);
            };
            self.preempt(victim)?;
        }
    }

    /// The youngest sequence, of the tenant most above its guarantee, that may be preempted for `position`.
    fn victim(&self, position: usize, short: &Error) -> Result<Option<usize>> {
        let asking = &self.running[position];
        let own = asking.request.tenant.index;
        let mut best: Option<(u64, usize)> = None;
        for (candidate, sequence) in self.running.iter().enumerate().skip(position + 1) {
            let tenant = &sequence.request.tenant;
            if position > 0 && !sequence.has_sampled {
                continue;
            }
            let above = if tenant.index == own {
                u64::MAX
            } else {
                if matches!(short, Error::OverQuota { .. }) || (position > 0 && self.is_oldest(candidate)) {
                    continue;
                }
                let account = self.pool.account_stats(tenant.account)?;
                let above = account.committed.saturating_sub(account.guaranteed);
                if above == 0 {
                    continue;
                }
                above
            };
            if best.is_none_or(|(most, _)| above >= most) {
                best = Some((above, candidate));
            }
        }
        Ok(best.map(|(_, candidate)| candidate))
    }

    /// Whether no running sequence of the same tenant is older.
    fn is_oldest(&self, position: usize) -> bool {
        let tenant = self.running[position].request.tenant.index;
        self.running[..position].iter().all(|sequence| sequence.request.tenant.index != tenant)
    }

    /// Takes everything from a sequence; it goes back to its place in the queue with its tokens. What is cached
    /// of it may be matched again when it resumes.
    fn preempt(&mut self, position: usize) -> Result<()> {
        let mut sequence = self.running.remove(position);
        self.release(&mut sequence)?;
        self.num_preemptions += 1;
        self.queue.push(sequence.into_waiting());
        Ok(())
    }
}
