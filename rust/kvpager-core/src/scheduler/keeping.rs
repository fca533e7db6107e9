//! When a prefix is kept after its request's end, and when it is let go for somebody who is short of blocks.

use super::core::Core;
use super::group_blocks::find_groups;
use super::kept::Kept;
use super::kept_paths::Path;
use super::pause::Halted;
use super::scopes::Reach;
use super::sequence::Sequence;
use super::tenant::Tenant;
use crate::ids::{AccountId, BlockHandle};
use crate::prefix_index::{ChainPin, Pin};
use crate::{Error, Result};
use std::collections::HashSet;
use std::sync::Arc;

impl Core {
    /// A sequence has ended: what the index has of it is kept if its session goes on, or if it was asked for.
    pub(super) fn keep_prefix(&mut self, sequence: &Sequence) -> Result<()> {
        let request = &sequence.request;
        let session = request.session.as_ref().filter(|session| session.is_open());
        let Some(retention) = session.map(|session| session.retention).or(request.retention) else {
            return Ok(());
        };
        if self.draining.is_some() {
            return Ok(());
        }
        let computed = (sequence.num_computed / self.config.block_size) as usize;
        let asked = retention.num_tokens.map_or(computed, |asked| self.config.blocks_for(asked) as usize);
        let Some((pin, blocks)) = self.hold_own(sequence, asked.min(computed))? else { return Ok(()) };
        let start = blocks.len() - pin.num_blocks();
        let Some(groups) = self.hold_groups(&blocks, start, &request.tenant)? else { return Ok(()) };
        self.kept.keep(Kept {
            pin,
            groups,
            path: Path::new(&blocks[start..]),
            owner: Arc::clone(&request.tenant),
            retention,
            since: self.moment(),
            session: session.map(|session| session.number),
            is_salted: request.salt.is_some(),
        });
        self.kept.keep_within(&request.tenant);
        Ok(())
    }

    /// Holds what a request with the first `num_blocks` blocks of a sequence would find of its tenant's own, as far as
    /// the tenant's bound for what is kept: its pin, and all blocks of the prefix. The sequence may still hold it too, so
    /// nothing is used again by this.
    fn hold_own(&self, sequence: &Sequence, num_blocks: usize) -> Result<Option<(Pin, Vec<BlockHandle>)>> {
        let most = sequence.request.tenant.max_kept_blocks as usize;
        let mut wanted = num_blocks;
        while most > 0 && wanted > 0 {
            let tokens = &sequence.tokens[..wanted * self.config.block_size as usize];
            let mut blocks = Vec::with_capacity(wanted);
            let found = find_groups(
                self.index.as_ref(),
                &sequence.request,
                Reach::All,
                tokens,
                &self.config,
                &mut blocks,
            );
            let found = match found {
                Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::Refused { .. }) => None,
                found => found?,
            };
            let Some(pin) = found.and_then(ChainPin::into_own) else { break };
            let num_own = pin.num_blocks();
            let start = blocks.len() - num_own;
            let num_blocks = self.num_spared(num_own) + self.num_group_blocks(start, blocks.len());
            let excess = num_blocks.saturating_sub(most);
            if excess == 0 {
                return Ok((num_own > 0).then_some((pin, blocks)));
            }
            wanted = blocks.len().saturating_sub(excess);
        }
        Ok(None)
    }

    /// Lets go of what is kept past its time, or was purged.
    pub(super) fn end_kept(&mut self) {
        self.kept.release_passed(self.moment());
        if let Some(index) = &self.index {
            self.kept.release_purged(index.num_purges());
        }
    }

    /// Lets one kept prefix go, of those whose blocks help a tenant that is short: its own, or, if the pool is short, of
    /// the tenant that is most above its guarantee. False if there is none, or none is needed: what was let go under
    /// open steps comes free when those have closed.
    pub(super) fn release_kept(&mut self, tenant: &Tenant, short: &Error) -> Result<bool> {
        if self.kept.is_empty() || self.is_coming(tenant, short) {
            return Ok(false);
        }
        let own_only = match short {
            Error::OutOfBlocks { .. } => false,
            Error::OverQuota { .. } => true,
            // Its limit of salts is in use.
            Error::Refused { retryable: true, .. } => {
                return Ok(self.kept.release_first(tenant.index, |kept| kept.is_salted).is_some());
            }
            _ => return Ok(false),
        };
        let mut giver = (tenant.index, tenant.account);
        let mut released = self.kept.release_first(giver.0, |_| true);
        if released.is_none()
            && !own_only
            && let Some(other) = self.most_above_guarantee(tenant.compartment)?
        {
            giver = other;
            released = self.kept.release_first(giver.0, |_| true);
        }
        if let (Some(num_blocks), Some(open)) = (released, self.open.back()) {
            self.note_coming(tenant.compartment, open.id, giver.1, num_blocks as u32);
        }
        Ok(released.is_some())
    }

    /// Whether as many blocks as a tenant is short of come free when steps close.
    pub(super) fn is_coming(&self, tenant: &Tenant, short: &Error) -> bool {
        let Some((missing, own_only)) = missing_blocks(short) else { return false };
        let coming = self.compartments[tenant.compartment].coming.iter();
        let coming = coming.filter(|coming| !own_only || coming.account == tenant.account);
        let left = coming.map(|coming| u64::from(coming.left)).sum::<u64>();
        left > 0 && left >= missing
    }

    /// Of a compartment's tenants that keep something, the one that is most above its guarantee, with its account.
    fn most_above_guarantee(&self, compartment: usize) -> Result<Option<(usize, AccountId)>> {
        let mut most = None;
        for (owner, _) in self.kept.owners().filter(|(owner, _)| owner.compartment == compartment) {
            let account = self.pool.account_stats(owner.account)?;
            let above = account.committed.saturating_sub(account.guaranteed);
            most = most.max((above > 0).then_some((above, owner.index, owner.account)));
        }
        Ok(most.map(|(_, tenant, account)| (tenant, account)))
    }

    /// Whether all that is kept could be what a fork is short of, with what comes free when steps close. If not, it is
    /// refused, and keeps what is kept as it is. What a sequence holds as well does not come free.
    pub(super) fn kept_may_be_enough(&self, tenant: &Tenant, short: &Error) -> Result<bool> {
        let Some((missing, own_only)) = missing_blocks(short) else { return Ok(true) };
        let halted = self.halted.iter().map(|Halted { sequence, .. }| sequence);
        let sequences = self.running.iter().chain(&self.parked).chain(halted);
        let held: HashSet<BlockHandle> =
            sequences.flat_map(|sequence| sequence.blocks.iter().copied()).collect();
        let coming = self.compartments[tenant.compartment].coming.iter();
        let coming = coming.filter(|coming| !own_only || coming.account == tenant.account);
        let mut enough = coming.map(|coming| u64::from(coming.left)).sum::<u64>();
        for (owner, num_blocks) in self.kept.owners_alone(|block| held.contains(block)) {
            if owner.index == tenant.index {
                enough += num_blocks;
            } else if !own_only && owner.compartment == tenant.compartment {
                // Nobody gives of what is guaranteed to it.
                let account = self.pool.account_stats(owner.account)?;
                enough += num_blocks.min(account.committed.saturating_sub(account.guaranteed));
            }
        }
        Ok(missing <= enough)
    }

    /// Whether all that is kept and all that paused requests have could be what a waiting request is short of. If not,
    /// nobody would be helped by letting it go.
    pub(super) fn may_be_enough(&self, tenant: &Tenant, short: &Error) -> bool {
        let Some((missing, own_only)) = missing_blocks(short) else { return true };
        let gives = |other: &Tenant| {
            other.index == tenant.index || !own_only && other.compartment == tenant.compartment
        };
        let paused = self.halted.iter().map(|Halted { sequence, .. }| sequence);
        let paused = paused.filter(|sequence| gives(&sequence.request.tenant));
        let of =
            |sequence: &Sequence| sequence.num_held() as u64 + u64::from(sequence.reservation.num_blocks());
        let kept = self.kept.owners().filter(|(owner, _)| gives(owner));
        missing
            <= kept.map(|(_, num_blocks)| num_blocks).sum::<u64>()
                + paused.map(|sequence| of(sequence)).sum::<u64>()
    }
}

/// Blocks that somebody is short of, and whether only those of its own tenant help.
const fn missing_blocks(short: &Error) -> Option<(u64, bool)> {
    match *short {
        Error::OutOfBlocks { needed, available, .. } => Some((needed.saturating_sub(available), false)),
        Error::OverQuota { needed, available, .. } => Some((needed.saturating_sub(available), true)),
        _ => None,
    }
}
