//! Counts of one namespace.

use super::PrefixIndex;
use crate::error::Result;
use crate::ids::NamespaceId;
use crate::sync::Ordering;

/// What a namespace has now. A function of what was done in it, and of what eviction took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceStats {
    /// Blocks that can be matched.
    pub num_blocks: usize,
    /// Nodes that have them.
    pub num_nodes: usize,
    /// Blocks that a purge cut off and that are still held.
    pub num_purged_blocks: usize,
    /// How often it was purged.
    pub num_purges: u32,
}

impl PrefixIndex {
    /// Counts of a namespace. Reads all of its nodes.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown namespace.
    pub fn namespace_stats(&self, namespace: NamespaceId) -> Result<NamespaceStats> {
        let namespace = self.namespaces.get(namespace)?;
        let tree = namespace.read_tree();
        // Relaxed: changes under the tree's exclusive lock only.
        let num_purges = namespace.num_purges.load(Ordering::Relaxed);
        let mut stats = NamespaceStats { num_purges, ..NamespaceStats::default() };
        for id in (0..tree.num_slots()).filter(|&id| tree.is_live(id)) {
            let num_blocks = tree.node(id).blocks.len();
            if !tree.is_stale(id) {
                stats.num_nodes += 1;
                stats.num_blocks += num_blocks;
            } else {
                stats.num_purged_blocks += num_blocks;
            }
        }
        Ok(stats)
    }
}
