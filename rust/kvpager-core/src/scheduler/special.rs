//! What few sequences have; the others pay a null pointer for it.

use super::request::WaitingRequest;

/// See the fields.
#[derive(Debug, Default)]
pub(super) struct Special {
    /// Tokens that are guessed to be sampled next.
    pub(super) drafts: Vec<u32>,
    /// Its last, partly filled block may be shared with other sequences: its first write copies it.
    pub(super) shares_tail: bool,
    /// It becomes several sequences when its prompt, or what the branches in it have in common, is computed.
    pub(super) is_unforked: bool,
    /// The other branches of a set that comes back, in no order.
    pub(super) branches: Vec<WaitingRequest>,
    /// How many leading tokens they and it have in common, in whole blocks.
    pub(super) split_at: u32,
}

impl Special {
    fn is_empty(&self) -> bool {
        self.drafts.is_empty() && !self.shares_tail && !self.is_unforked
    }

    pub(super) const fn may_draft(&self) -> bool {
        !self.is_unforked
    }
}

impl super::sequence::Sequence {
    pub(super) fn special_mut(&mut self) -> &mut Special {
        self.special.get_or_insert_default()
    }

    /// Forgets the box when nothing is in it.
    pub(super) fn drop_special(&mut self) {
        if self.special.as_ref().is_some_and(|special| special.is_empty()) {
            self.special = None;
        }
    }

    pub(super) fn shares_tail(&self) -> bool {
        self.special.as_ref().is_some_and(|special| special.shares_tail)
    }
}
