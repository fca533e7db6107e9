//! Finding sequences of a batch that share their first blocks, for a cascade.
//!
//! A prefix that the index handed to several sequences is the same physical blocks in each of their tables, so
//! the tables alone say who shares what; tokens are not looked at again.

use super::Int32Matrix;
use crate::{Error, Result};

/// Groups of sequences, as [`super::SharedPrefixes`] takes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixGroups {
    /// `[num_groups + 1]`: ranges of `sequences`.
    pub group_start: Vec<i32>,
    /// Members, in the order of the batch inside each group.
    pub sequences: Vec<i32>,
    /// `[num_groups]`: tokens that the members of each group share.
    pub prefix_lens: Vec<i32>,
}

/// One sequence whose table begins with whole blocks before its first query.
struct Candidate {
    first_block: i32,
    sequence: usize,
    row: usize,
    /// Whole blocks before the first query.
    room: usize,
}

/// Groups the sequences whose tables begin with the same blocks, where at least two share `min_tokens` tokens.
///
/// Lengths are as for [`super::PagedAttention`]; sequences without a table row or a whole block before their
/// query are in no group.
///
/// # Errors
/// `InvalidArgument` if the arrays do not fit each other.
pub fn prefix_groups(
    tables: &Int32Matrix,
    table_rows: Option<&[i32]>,
    query_start: &[i32],
    context_lens: &[i32],
    block_size: usize,
    min_tokens: usize,
) -> Result<PrefixGroups> {
    let num_sequences = context_lens.len();
    if query_start.len() != num_sequences + 1 || table_rows.is_some_and(|rows| rows.len() != num_sequences) {
        return Err(Error::invalid(format!(
            "query_start and table_rows do not fit {num_sequences} context_lens"
        )));
    }
    if block_size == 0 {
        return Err(Error::invalid("block_size is 0"));
    }
    let mut candidates: Vec<Candidate> = (0..num_sequences)
        .filter_map(|sequence| {
            let tokens = i64::from(query_start[sequence + 1]) - i64::from(query_start[sequence]);
            let before = usize::try_from(i64::from(context_lens[sequence]) - tokens).ok()?;
            let room = (before / block_size).min(tables.shape()[1]);
            let row = table_rows.map_or(Some(sequence), |rows| usize::try_from(rows[sequence]).ok())?;
            let first_block = tables.get(row, 0).filter(|_| tokens > 0 && room > 0)?;
            Some(Candidate { first_block, sequence, row, room })
        })
        .collect();
    candidates.sort_by_key(|candidate| (candidate.first_block, candidate.sequence));
    let mut groups = PrefixGroups { group_start: vec![0], ..PrefixGroups::default() };
    for members in candidates.chunk_by(|a, b| a.first_block == b.first_block) {
        let shared = common_blocks(tables, members) * block_size;
        if members.len() > 1 && shared >= min_tokens.max(1) {
            groups.sequences.extend(members.iter().map(|member| member.sequence as i32));
            groups.group_start.push(groups.sequences.len() as i32);
            groups.prefix_lens.push(shared as i32);
        }
    }
    Ok(groups)
}

/// Blocks that all members' tables begin with, before any member's query.
fn common_blocks(tables: &Int32Matrix, members: &[Candidate]) -> usize {
    let room = members.iter().map(|member| member.room).min().unwrap_or(0);
    let same = |column: usize| {
        let id = tables.get(members[0].row, column);
        id >= Some(0) && members.iter().all(|member| tables.get(member.row, column) == id)
    };
    (0..room).take_while(|&column| same(column)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_grouped_by_the_blocks_they_begin_with() {
        let rows = [[3, 4, 5, 9], [3, 4, 6, -1], [7, 4, 5, 1], [3, 4, 5, 8], [7, 2, -1, -1]];
        // SAFETY: a view of `rows`, which outlives it.
        let tables = unsafe { Int32Matrix::from_raw(rows.as_ptr().cast(), [5, 4], [16, 4]) };
        let find = |contexts: &[i32], min_tokens| {
            prefix_groups(&tables, None, &[0, 1, 2, 3, 4, 5], contexts, 8, min_tokens).unwrap()
        };
        let groups = find(&[30, 20, 32, 32, 12], 0);
        assert_eq!(groups.group_start, [0, 3, 5]);
        assert_eq!(groups.sequences, [0, 1, 3, 2, 4]);
        assert_eq!(groups.prefix_lens, [16, 8]);
        assert_eq!(find(&[30, 20, 32, 32, 12], 9).sequences, [0, 1, 3]);
        assert_eq!(find(&[30, 8, 32, 32, 0], 0).prefix_lens, [24]);
        assert_eq!(find(&[0; 5], 0), PrefixGroups { group_start: vec![0], ..PrefixGroups::default() });
    }
}
