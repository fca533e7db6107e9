//! Finding sequences of a batch that share their first blocks, for a cascade.
//!
//! A prefix that the index handed to several sequences is the same physical blocks in each of their tables, so
//! the tables alone say who shares what; tokens are not looked at again.

use super::Int32Matrix;
use crate::{Error, Result};
use std::ops::Range;

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

/// A sequence, and the blocks of its table that lie before its first query.
struct Member {
    sequence: usize,
    blocks: Vec<i32>,
}

/// Groups the sequences whose tables begin with the same blocks, so that the most reading is saved: a group of `n`
/// that shares `b` blocks saves `(n - 1) * b`. Where some of those that share a short prefix share a longer one,
/// only they become a group if that saves more. Groups of less than `min_tokens` are left out.
///
/// Lengths are as for [`super::PagedAttention`]; sequences without a table row or a whole block before their
/// query are in no group.
///
/// # Errors
/// `InvalidArgument` if the arrays do not fit each other.
///
/// # Complexity
/// A sort of the tables of sequences that share their first block.
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
    // (first block, sequence, table row, whole blocks before the first query)
    let mut candidates: Vec<(i32, usize, usize, usize)> = (0..num_sequences)
        .filter_map(|sequence| {
            let tokens = i64::from(query_start[sequence + 1]) - i64::from(query_start[sequence]);
            let before = usize::try_from(i64::from(context_lens[sequence]) - tokens).ok()?;
            let room = (before / block_size).min(tables.shape()[1]);
            let row = table_rows.map_or(Some(sequence), |rows| usize::try_from(rows[sequence]).ok())?;
            let first_block = tables.get(row, 0).filter(|&id| id >= 0 && tokens > 0 && room > 0)?;
            Some((first_block, sequence, row, room))
        })
        .collect();
    candidates.sort_unstable();
    let mut groups = PrefixGroups { group_start: vec![0], ..PrefixGroups::default() };
    for sharing in candidates.chunk_by(|a, b| a.0 == b.0).filter(|sharing| sharing.len() > 1) {
        let read = |&(_, sequence, row, room): &(i32, usize, usize, usize)| {
            let blocks =
                (0..room).map_while(|column| tables.get(row, column).filter(|id| *id >= 0)).collect();
            Member { sequence, blocks }
        };
        let mut members: Vec<Member> = sharing.iter().map(read).collect();
        members.sort_by(|a, b| a.blocks.cmp(&b.blocks));
        let shared: Vec<usize> =
            members.windows(2).map(|pair| common(&pair[0].blocks, &pair[1].blocks)).collect();
        let min_blocks = min_tokens.div_ceil(block_size).max(1);
        for group in best_groups(&shared, min_blocks).groups {
            let mut sequences: Vec<i32> =
                members[group.members].iter().map(|member| member.sequence as i32).collect();
            sequences.sort_unstable();
            groups.sequences.extend(sequences);
            groups.group_start.push(groups.sequences.len() as i32);
            groups.prefix_lens.push((group.blocks * block_size) as i32);
        }
    }
    Ok(groups)
}

fn common(a: &[i32], b: &[i32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Neighbours in the order of their tables, and the blocks that all of them begin with.
struct Group {
    members: Range<usize>,
    blocks: usize,
}

/// Disjoint groups and the blocks that need not be read again.
#[derive(Default)]
struct Choice {
    groups: Vec<Group>,
    saved: usize,
}

/// The groups that save most among sorted tables, of which neighbours `i` and `i + 1` share `shared[i]` blocks.
///
/// Runs of neighbours that share at least as much as their surroundings form a tree, whose node is worth either
/// itself or the best of its children. A stack holds the path to the last table.
fn best_groups(shared: &[usize], min_blocks: usize) -> Choice {
    struct Node {
        start: usize,
        blocks: usize,
        children: Choice,
    }
    let mut path = vec![Node { start: 0, blocks: 0, children: Choice::default() }];
    for (index, blocks) in shared.iter().copied().chain([0]).enumerate() {
        let mut start = index;
        while let Some(node) = path.pop_if(|node| node.blocks > blocks) {
            start = node.start;
            let saved = (index - start) * node.blocks;
            let own = node.blocks >= min_blocks && saved >= node.children.saved;
            let best = if own {
                Choice { groups: vec![Group { members: start..index + 1, blocks: node.blocks }], saved }
            } else {
                node.children
            };
            // The next node up: the one below on the path, or a new one that begins where this one did.
            if path.last().is_none_or(|parent| parent.blocks < blocks) {
                path.push(Node { start, blocks, children: Choice::default() });
            }
            if let Some(parent) = path.last_mut() {
                parent.children.saved += best.saved;
                parent.children.groups.extend(best.groups);
            }
        }
        if path.last().is_none_or(|top| top.blocks < blocks) {
            path.push(Node { start, blocks, children: Choice::default() });
        }
    }
    path.pop().map_or_else(Choice::default, |root| root.children)
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

    #[test]
    fn a_longer_prefix_of_some_is_a_group_of_its_own_where_that_saves_more() {
        // Blocks shared by neighbours: 4 tables share 1 block, the middle two share 5.
        let found = best_groups(&[1, 5, 1], 1);
        assert_eq!(found.saved, 5);
        assert_eq!(found.groups.len(), 1);
        assert_eq!((found.groups[0].members.clone(), found.groups[0].blocks), (1..3, 5));
        assert_eq!(best_groups(&[2, 3, 2], 1).saved, 6);
        assert_eq!(best_groups(&[2, 3, 2], 3).saved, 3);
        assert_eq!(best_groups(&[2, 3, 2], 4).groups.len(), 0);
        assert_eq!(best_groups(&[], 1).groups.len(), 0);
    }

    /// The most that disjoint runs can save, each with all that share as much as its members do.
    fn most_saved(shared: &[usize], min_blocks: usize) -> usize {
        let mut best = vec![0; shared.len() + 2];
        for end in 1..=shared.len() + 1 {
            best[end] = best[end - 1];
            for start in 0..end.saturating_sub(1) {
                let blocks = shared[start..end - 1].iter().copied().min().unwrap_or(0);
                let whole = [start.checked_sub(1), Some(end - 1)].into_iter().flatten();
                let whole = whole.filter_map(|at| shared.get(at)).all(|&outside| outside < blocks);
                let saved = if whole && blocks >= min_blocks { (end - 1 - start) * blocks } else { 0 };
                best[end] = best[end].max(best[start] + saved);
            }
        }
        best[shared.len() + 1]
    }

    proptest::proptest! {
        #[test]
        fn no_other_groups_save_more(
            shared in proptest::collection::vec(0usize..6, 0..12), min_blocks in 1usize..4,
        ) {
            let found = best_groups(&shared, min_blocks);
            proptest::prop_assert_eq!(found.saved, most_saved(&shared, min_blocks));
            let mut end = 0;
            for group in &found.groups {
                proptest::prop_assert!(group.members.start >= end && group.members.len() > 1);
                end = group.members.end;
                let smallest = shared[group.members.start..end - 1].iter().copied().min();
                proptest::prop_assert_eq!(smallest, Some(group.blocks));
            }
        }
    }
}
