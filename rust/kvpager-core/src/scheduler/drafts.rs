//! Speculative decoding: tokens that somebody guesses, verified in the batch of the next step.
//!
//! A sequence with `k` drafts computes `1 + k` tokens and samples after each. `commit` brings the drafts that were
//! right and one token more; KV of the others stays beyond the sequence's end, where nobody reads it, until the next
//! step overwrites it. So nothing is cached before it was accepted, and rolling back is not advancing.
//!
//! Drafts never reach beyond `max_tokens`, so their slots are part of the lifetime that `reserve` promises.

use super::Scheduler;
use super::core::Core;
use super::open_steps::PlannedRow;
use super::request::FinishReason;
use crate::ids::SequenceId;
use crate::{Error, Result};

/// Most drafts of a sequence in a step.
pub const MAX_DRAFTS: usize = 64;

/// Drafts by their place after the last known token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Verified in a committed step.
    pub verified: Vec<u64>,
    /// Of those, accepted.
    pub accepted: Vec<u64>,
}

impl DraftCounts {
    fn note(&mut self, num_drafts: usize, num_accepted: usize) {
        if self.verified.len() < num_drafts {
            self.verified.resize(num_drafts, 0);
            self.accepted.resize(num_drafts, 0);
        }
        self.verified[..num_drafts].iter_mut().for_each(|count| *count += 1);
        self.accepted[..num_accepted].iter_mut().for_each(|count| *count += 1);
    }
}

impl Scheduler {
    /// Proposes drafts for the next step: `tokens[draft_start[i]..draft_start[i + 1]]` are guessed to follow the last
    /// known token of `sequences[i]`. They replace earlier ones. Returns how many will be tried: none for a sequence
    /// that has ended, does not run, is aborted or paused by the next step, has more than one token to compute or is in an
    /// open step, and only as many as `max_tokens` leaves room for. Fewer may be planned if tokens or blocks are short.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for arrays that do not fit together, an id that was never issued or is there
    /// twice, or more than [`MAX_DRAFTS`] drafts; [`Error::WrongState`] if another thread is in the scheduler. Nothing has changed then.
    pub fn propose(&self, sequences: &[SequenceId], draft_start: &[i32], tokens: &[i32]) -> Result<u64> {
        check_proposal(sequences, draft_start, tokens)?;
        for &id in sequences {
            self.check_issued(id)?;
        }
        let mut core = self.enter()?;
        let mut num_kept = 0;
        // What others have asked for is done by the next step, before it plans.
        let is_asked = !self.inbox.is_empty();
        for (i, &id) in sequences.iter().enumerate() {
            let pauses = || core.sets.members(id).into_iter().any(|branch| self.inbox.is_pausing(branch));
            if is_asked && (!self.inbox.is_live(id) || pauses()) {
                continue;
            }
            num_kept += core.keep_drafts(id, &tokens[draft_start[i] as usize..draft_start[i + 1] as usize]);
        }
        Ok(num_kept)
    }

    /// Drafts verified and accepted so far, by place.
    ///
    /// # Errors
    /// [`Error::WrongState`] if another thread is in the scheduler.
    pub fn draft_counts(&self) -> Result<DraftCounts> {
        Ok(self.enter()?.draft_counts.clone())
    }
}

fn check_proposal(sequences: &[SequenceId], draft_start: &[i32], tokens: &[i32]) -> Result<()> {
    let ends = (draft_start.first().copied(), draft_start.last().copied());
    if draft_start.len() != sequences.len() + 1 || ends != (Some(0), i32::try_from(tokens.len()).ok()) {
        let end = |end: Option<i32>| end.map_or("nothing".to_owned(), |end| end.to_string());
        return Err(Error::invalid(format!(
            "draft_start has {} and runs from {} to {}; {} and {} need {}, from 0 to {}",
            crate::count_of(draft_start.len(), "entry"),
            end(ends.0),
            end(ends.1),
            crate::count_of(sequences.len(), "sequence"),
            crate::count_of(tokens.len(), "token"),
            sequences.len() + 1,
            tokens.len()
        )));
    }
    for (i, pair) in draft_start.windows(2).enumerate() {
        let count = i64::from(pair[1]) - i64::from(pair[0]);
        if !(0..=MAX_DRAFTS as i64).contains(&count) {
            return Err(Error::invalid(format!(
                "{} for sequence {}, must be 0 to {MAX_DRAFTS}",
                crate::count(count, "draft"),
                sequences[i]
            )));
        }
    }
    let mut sorted = sequences.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::invalid(format!("sequence {} is named twice", pair[0])));
    }
    match tokens.iter().position(|&token| token < 0) {
        Some(i) => {
            Err(Error::invalid(format!("draft tokens[{i}] is {}, must be 0 to {}", tokens[i], i32::MAX)))
        }
        None => Ok(()),
    }
}

impl Core {
    fn keep_drafts(&mut self, id: SequenceId, tokens: &[i32]) -> u64 {
        let Some(position) = self.position(id) else { return 0 };
        if self.pausing.contains(&id) {
            return 0;
        }
        let sequence = &mut self.running[position];
        let can_verify = sequence.ending.is_none()
            && sequence.in_flight == 0
            && sequence.remaining() == 1
            && sequence.special.as_ref().is_none_or(|special| special.may_draft());
        if !can_verify {
            return 0;
        }
        let room = sequence.request.max_tokens - sequence.num_outputs() - 1;
        let kept = &tokens[..tokens.len().min(room as usize)];
        sequence.special_mut().drafts = kept.iter().map(|&token| token as u32).collect();
        sequence.drop_special();
        kept.len() as u64
    }

    /// How many of its drafts a sequence verifies in this step. It gets the blocks for them if they are free, and
    /// `left` tokens of the budget are for those behind it.
    pub(super) fn plan_drafts(&mut self, position: usize, budget: u32, left: u32) -> Result<u32> {
        let sequence = &self.running[position];
        let Some(special) = &sequence.special else { return Ok(0) };
        let mut count = (special.drafts.len() as u32).min(budget.saturating_sub(1 + left));
        let end = sequence.frontier() + 1;
        count = count.min(self.promised_end(sequence).saturating_sub(end));
        if count > 0 && self.grow(position, end + count)?.is_err() {
            let sequence = &self.running[position];
            // What others have too is copied first, and was not.
            let is_own = !sequence.shares_tail();
            let room = u32::from(is_own) * sequence.blocks.len() as u32 * self.config.block_size;
            count = count.min(room.saturating_sub(end));
        }
        if let Some(special) = &mut self.running[position].special {
            special.drafts.truncate(count as usize);
        }
        Ok(count)
    }

    /// Checks what `commit` brings for a row with drafts, as many as it may: those accepted, and one token more.
    pub(super) fn check_drafts(&self, row: &PlannedRow, given: &[i32]) -> Result<()> {
        let Some(position) = self.locate(row) else { return Ok(()) };
        let Some(special) = &self.running[position].special else { return Ok(()) };
        for (i, (&token, &draft)) in given[..given.len() - 1].iter().zip(&special.drafts).enumerate() {
            if token as u32 != draft {
                return Err(Error::invalid(format!(
                    "token {i} for sequence {} is {token} and its draft was {draft}: the KV behind it is of \
                     another token, so nothing may follow",
                    row.id
                )));
            }
        }
        Ok(())
    }

    /// Takes the accepted drafts and the token after them; returns how many tokens were of no use because the
    /// sequence ended before them.
    pub(super) fn accept_drafts(&mut self, position: usize, row: &PlannedRow, given: &[i32]) -> u64 {
        let sequence = &mut self.running[position];
        self.draft_counts.note(row.num_drafts as usize, given.len() - 1);
        if let Some(special) = &mut sequence.special {
            special.drafts.clear();
        }
        sequence.drop_special();
        let mut taken = 0;
        for &token in given {
            taken += 1;
            sequence.ending = sequence.push_token(token as u32);
            if sequence.ending.is_some() {
                break;
            }
        }
        // The last token that was taken is not computed: nothing followed it in the batch that still counts.
        sequence.num_computed += taken;
        debug_assert!(sequence.ending != Some(FinishReason::Length) || taken as usize == given.len());
        (given.len() - taken as usize) as u64
    }
}
