//! How many blocks several prefixes have, each block counted once.
//!
//! A block has one place in the tree, so two prefixes that have a block at the same position have all blocks before it
//! in common. In lexical order the most that a prefix shares with any other is what it shares with a neighbour, and
//! where two part is found by bisection: counting takes no look at each block.

use crate::ids::BlockHandle;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

/// The blocks of a prefix, first to last.
#[derive(Clone, Debug)]
pub(super) struct Path(Arc<[BlockHandle]>);

impl Path {
    pub(super) fn new(blocks: &[BlockHandle]) -> Self {
        Self(blocks.into())
    }

    /// Leading blocks that two have in common.
    fn num_common(&self, other: &Self) -> usize {
        let (one, other) = (&self.0, &other.0);
        let (mut low, mut high) = (0, one.len().min(other.len()));
        while low < high {
            let middle = usize::midpoint(low, high);
            if one[middle] == other[middle] { low = middle + 1 } else { high = middle }
        }
        low
    }
}

impl Ord for Path {
    fn cmp(&self, other: &Self) -> Ordering {
        let common = self.num_common(other);
        let next = |path: &Self| path.0.get(common).map(|block| block.id());
        next(self).cmp(&next(other))
    }
}

impl PartialOrd for Path {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Path {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Path {}

/// Numbered prefixes, some of which may be equal.
#[derive(Debug, Default)]
pub(super) struct Paths {
    paths: BTreeSet<(Path, u64)>,
    num_blocks: u64,
}

impl Paths {
    pub(super) const fn new() -> Self {
        Self { paths: BTreeSet::new(), num_blocks: 0 }
    }

    /// Blocks of all of them.
    pub(super) const fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Of those blocks, the ones that nobody else holds.
    pub(super) fn num_blocks_alone(&self, is_held: impl Fn(&BlockHandle) -> bool) -> u64 {
        let (mut num_blocks, mut before) = (0, None);
        for (path, _) in &self.paths {
            let common = before.map_or(0, |before| path.num_common(before));
            num_blocks += path.0[common..].iter().filter(|block| !is_held(block)).count() as u64;
            before = Some(path);
        }
        num_blocks
    }

    pub(super) fn insert(&mut self, path: Path, number: u64) {
        let key = (path, number);
        self.num_blocks += self.num_alone(&key);
        self.paths.insert(key);
    }

    pub(super) fn remove(&mut self, path: Path, number: u64) {
        let key = (path, number);
        if self.paths.remove(&key) {
            self.num_blocks -= self.num_alone(&key);
        }
    }

    /// Numbers of the prefixes that are equal to this one.
    pub(super) fn equal_to<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = u64> + 'a {
        let from = self.paths.range((path.clone(), 0)..);
        from.take_while(move |(other, _)| other == path).map(|&(_, number)| number)
    }

    /// Blocks of a prefix that no other one has.
    fn num_alone(&self, key: &(Path, u64)) -> u64 {
        let before = self.paths.range(..key).next_back();
        let after = self.paths.range((Excluded(key), Unbounded)).next();
        let common = before.into_iter().chain(after).map(|(other, _)| key.0.num_common(other));
        (key.0.0.len() - common.max().unwrap_or(0)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::BlockId;
    use proptest::prelude::*;
    use std::collections::{HashMap, HashSet};

    /// Prefixes of a tree: the block of a step is a number for all steps up to it.
    fn path(steps: &[u8], ids: &mut HashMap<Vec<u8>, u32>) -> Path {
        let blocks: Vec<BlockHandle> = (1..=steps.len())
            .map(|end| {
                let next = ids.len() as u32;
                BlockHandle::new(0, BlockId(*ids.entry(steps[..end].to_vec()).or_insert(next)))
            })
            .collect();
        Path::new(&blocks)
    }

    proptest! {
        #[test]
        fn each_block_is_counted_once_however_many_prefixes_have_it(
            operations in prop::collection::vec(
                (prop::collection::vec(0..3u8, 1..7), prop::bool::weighted(0.7), 0..40usize),
                1..60,
            ),
        ) {
            let (mut paths, mut ids, mut present) = (Paths::default(), HashMap::new(), Vec::new());
            for (number, (steps, is_insert, which)) in operations.into_iter().enumerate() {
                if is_insert || present.is_empty() {
                    let path = path(&steps, &mut ids);
                    let twins = present.iter().filter(|(other, _): &&(Path, u64)| other.0 == path.0).count();
                    prop_assert_eq!(paths.equal_to(&path).count(), twins);
                    paths.insert(path.clone(), number as u64);
                    present.push((path, number as u64));
                } else {
                    let (path, number) = present.swap_remove(which % present.len());
                    paths.remove(path, number);
                }
                let blocks: HashSet<_> = present.iter().flat_map(|(path, _)| path.0.iter().copied()).collect();
                prop_assert_eq!(paths.num_blocks(), blocks.len() as u64);
            }
        }
    }
}
