//! Reuse of a part of a block, for requests that ask for it: the block is copied, and the sequence goes on in its copy
//! after the tokens that agree. The source stays pinned until the step that copies it is open, and as it is until that
//! step closes.

use super::core::{Core, draw};
use super::sequence::Sequence;
use super::share::note_found;
use crate::ids::BlockHandle;
use crate::{Error, Result};

impl Core {
    /// Gives a sequence that is being admitted, and has its whole blocks from the index, a copy of the block that
    /// begins most like its next tokens. Without one, or without room for it, nothing happens.
    pub(super) fn copy_partial(&mut self, sequence: &mut Sequence) -> Result<()> {
        if sequence.layers.is_some() {
            // Only the first group's block would be copied.
            return Ok(());
        }
        let start = sequence.num_computed as usize;
        // The last token is always computed.
        let end = (start + self.config.block_size as usize).min(sequence.num_common());
        let (true, Some(index), Some(pin)) = (sequence.request.partial, &self.index, &sequence.pin) else {
            return Ok(());
        };
        let Some(scopes) = sequence.request.tenant.scopes() else { return Ok(()) };
        if start >= end || sequence.reservation.num_blocks() == 0 {
            return Ok(());
        }
        let request = &sequence.request;
        let chain = scopes.chain(index, &request.tenant.name, request.salt.as_deref())?;
        let keys = request.keys(index, start, &sequence.tokens[start..end])?;
        let source = match index.match_partial_chain(&chain, pin, &keys) {
            Ok(Some(source)) => source,
            Ok(None) | Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut to = [BlockHandle::from_bits(0)];
        match draw(self.index.as_deref(), &mut sequence.reservation, &mut to) {
            Ok(()) => {}
            Err(Error::NeedsReclaim { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        let gained = source.num_tokens as u32;
        sequence.blocks.push(to[0]);
        self.tables.append(sequence.row, to[0].id());
        note_found(sequence, gained);
        sequence.num_computed += gained;
        self.copies.copy_pinned(sequence, source, to[0]);
        self.scratch.clear();
        self.scratch.extend(to);
        self.note_owner(sequence.request.tenant.account);
        Ok(())
    }
}
