//! Layer groups: layers that keep the same tokens, cut so that a block has the same bytes in every group.

use super::shape::Span;

/// Layers that keep the same tokens and share one block table row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroup {
    /// Which tokens the layers keep.
    pub span: Span,
    /// Layers of the group, by their number in the model.
    pub layers: Vec<u32>,
    /// Bytes that one token takes in these layers.
    pub bytes_per_token: u64,
    /// Bytes a token of the block layout that these layers do not fill.
    pub padding_bytes_per_token: u64,
}

/// A layer's number, span and bytes a token.
pub(super) type LayerBytes = (u32, Span, u64);

/// How much of one request's memory padding may cost before more, smaller groups are taken instead.
const TOLERATED_PADDING: f64 = 0.05;

/// Splits layers into groups with equal block bytes.
///
/// Fewer groups mean fewer block tables, smaller blocks mean less padding. Among the block sizes that waste at
/// most 5 % of what one request of `reference_length` tokens holds, the one with the fewest groups wins;
/// if none does, the one that wastes least. Returns the groups and the bytes a token of one block.
pub(super) fn split(layers: &[LayerBytes], reference_length: u64) -> (Vec<LayerGroup>, u64) {
    let mut kinds: Vec<(Span, Vec<&LayerBytes>)> = Vec::new();
    for layer in layers {
        match kinds.iter_mut().find(|(span, _)| *span == layer.1) {
            Some((_, members)) => members.push(layer),
            None => kinds.push((layer.1, vec![layer])),
        }
    }
    kinds.sort_by_key(|(span, _)| *span);
    let largest = layers.iter().map(|layer| layer.2).max().unwrap_or(1);
    let candidates = kinds.iter().flat_map(|(_, members)| {
        let total: u64 = members.iter().map(|layer| layer.2).sum();
        (1..=members.len() as u64).map(move |parts| total.div_ceil(parts).max(largest))
    });
    candidates
        .map(|block_bytes| (cut(&kinds, block_bytes), block_bytes))
        .map(|(groups, block_bytes)| {
            // The largest group may stay below the target: shrink the block to it.
            let used = groups.iter().map(|group| group.bytes_per_token).max().unwrap_or(block_bytes);
            (groups, used)
        })
        .min_by(|a, b| rank(a, reference_length).total_cmp(&rank(b, reference_length)))
        .map(|(groups, block_bytes)| (padded(groups, block_bytes), block_bytes))
        .unwrap_or_default()
}

/// Smaller is better: groups when the padding is tolerable, padding (on top of any group count) when not.
fn rank((groups, block_bytes): &(Vec<LayerGroup>, u64), reference_length: u64) -> f64 {
    let (mut real, mut held) = (0.0, 0.0);
    for group in groups {
        let tokens =
            group.span.window().map_or(reference_length, |window| window.min(reference_length)) as f64;
        real += tokens * group.bytes_per_token as f64;
        held += tokens * *block_bytes as f64;
    }
    let padding = 1.0 - real / held.max(1.0);
    if padding <= TOLERATED_PADDING { groups.len() as f64 + padding } else { 1e6 + padding }
}

/// Fills groups of at most `block_bytes` with each kind's layers in order.
fn cut(kinds: &[(Span, Vec<&LayerBytes>)], block_bytes: u64) -> Vec<LayerGroup> {
    let mut groups: Vec<LayerGroup> = Vec::new();
    for (span, members) in kinds {
        let mut open: Option<LayerGroup> = None;
        for &&(layer, _, bytes) in members {
            match &mut open {
                Some(group) if group.bytes_per_token + bytes <= block_bytes => {
                    group.layers.push(layer);
                    group.bytes_per_token += bytes;
                }
                _ => groups.extend(open.replace(LayerGroup {
                    span: *span,
                    layers: vec![layer],
                    bytes_per_token: bytes,
                    padding_bytes_per_token: 0,
                })),
            }
        }
        groups.extend(open);
    }
    groups
}

fn padded(mut groups: Vec<LayerGroup>, block_bytes: u64) -> Vec<LayerGroup> {
    for group in &mut groups {
        group.padding_bytes_per_token = block_bytes - group.bytes_per_token;
    }
    groups
}
