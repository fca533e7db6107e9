//! Identity: changing any one field gives a disjoint namespace, and equal identity gives the same.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{
    Adapter, EvictionPolicy, Fingerprint, IndexConfig, PrefixIndex, ShareScope,
};
use kvpager_core::{AccountId, BlockHandle, BlockId, NamespaceId};
use proptest::prelude::*;
use std::sync::Arc;

fn index() -> (Arc<PrefixIndex>, AccountId) {
    let pool = BlockPool::new(PoolConfig { num_blocks: 64, ..PoolConfig::default() }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: 64 }).unwrap();
    let config = IndexConfig { block_size: 4, eviction: EvictionPolicy::Lru };
    (PrefixIndex::new(pool, config).unwrap(), account)
}

fn alice() -> ShareScope {
    ShareScope::Private("alice".into())
}

fn stated() -> Fingerprint {
    let text = |text: &str| Some(text.to_owned());
    Fingerprint {
        model: text("model"),
        model_revision: text("1"),
        tokenizer_revision: text("2"),
        chat_template: text("3"),
        adapters: Some(vec![Adapter { digest: "a".into(), scale: Some(1.0) }]),
        rope_type: text("llama3"),
        rope_theta: Some(1e5),
        rope_scaling: text("{\"factor\":8}"),
        attention_mask: text("causal"),
        window: Some(4096),
        kv_dtype: text("bf16"),
        kv_scales: text("none"),
        numerics: text("fp32"),
        block_size: Some(16),
    }
}

/// Fills one namespace, then looks the same tokens up in the other.
fn assert_disjoint(ours: &Fingerprint, theirs: &Fingerprint) {
    let (index, account) = index();
    let first = index.namespace(&alice(), ours, account).unwrap();
    let second = index.namespace(&alice(), theirs, account).unwrap();
    assert_ne!(first, second);
    let tokens: Vec<u32> = (0..8).collect();
    let mut pin = index.root(first).unwrap();
    let mut blocks = vec![BlockHandle::new(0, BlockId(0)); 2];
    index.pool().allocate(account, &mut blocks).unwrap();
    index.extend(&mut pin, &tokens, &mut blocks).unwrap();
    let hit =
        |namespace: NamespaceId| index.match_whole(namespace, &tokens, &mut Vec::new()).unwrap().num_blocks();
    assert_eq!((hit(first), hit(second)), (2, 0));
}

macro_rules! field_tests {
    ($($test:ident: $field:ident = $other:expr;)*) => {
        $(
            #[test]
            fn $test() {
                let changed = Fingerprint { $field: $other, ..stated() };
                assert_disjoint(&stated(), &changed);
                let absent = Fingerprint { $field: None, ..stated() };
                assert_disjoint(&stated(), &absent);
                assert_disjoint(&changed, &absent);
            }
        )*

        #[test]
        fn test_every_field_has_a_test() {
            // Does not compile when a field is added without a line above.
            let Fingerprint { $($field: _),* } = stated();
        }
    };
}

field_tests! {
    test_another_model_is_disjoint: model = Some("other".into());
    test_other_weights_are_disjoint: model_revision = Some("".into());
    test_another_tokenizer_is_disjoint: tokenizer_revision = Some("".into());
    test_another_chat_template_is_disjoint: chat_template = Some("".into());
    test_another_adapter_is_disjoint: adapters = Some(vec![]);
    test_another_rope_type_is_disjoint: rope_type = Some("yarn".into());
    test_another_rope_theta_is_disjoint: rope_theta = Some(1e4);
    test_another_rope_scaling_is_disjoint: rope_scaling = Some("".into());
    test_another_mask_is_disjoint: attention_mask = Some("sliding".into());
    test_another_window_is_disjoint: window = Some(0);
    test_another_kv_dtype_is_disjoint: kv_dtype = Some("fp8".into());
    test_other_kv_scales_are_disjoint: kv_scales = Some("".into());
    test_other_numerics_are_disjoint: numerics = Some("".into());
    test_another_block_size_is_disjoint: block_size = Some(32);
}

#[test]
fn test_order_and_scale_of_adapters_are_identity() {
    let with = |adapters: &[(&str, Option<f64>)]| Fingerprint {
        adapters: Some(
            adapters.iter().map(|&(digest, scale)| Adapter { digest: digest.into(), scale }).collect(),
        ),
        ..stated()
    };
    let variants = [
        with(&[("a", None), ("b", None)]),
        with(&[("b", None), ("a", None)]),
        with(&[("a", Some(0.5)), ("b", None)]),
        with(&[("ab", None)]),
    ];
    for (i, one) in variants.iter().enumerate() {
        for other in &variants[i + 1..] {
            assert_disjoint(one, other);
        }
    }
}

#[test]
fn test_equal_identity_is_the_same_namespace() {
    let (index, account) = index();
    let first = index.namespace(&alice(), &stated(), account).unwrap();
    assert_eq!(index.namespace(&alice(), &stated(), account).unwrap(), first);
    assert_eq!(index.num_namespaces(), 1);
}

#[test]
fn test_no_scope_imitates_another() {
    let (index, account) = index();
    let scopes = [
        ShareScope::Private("x".into()),
        ShareScope::Group("x".into()),
        ShareScope::Public("x".into()),
        ShareScope::Salted { tenant: "x".into(), salt: vec![] },
        ShareScope::Salted { tenant: "x".into(), salt: b"y".to_vec() },
        ShareScope::Private("xy".into()),
        ShareScope::Salted { tenant: "".into(), salt: b"xy".to_vec() },
    ];
    let ids: std::collections::HashSet<NamespaceId> =
        scopes.iter().map(|scope| index.namespace(scope, &stated(), account).unwrap()).collect();
    assert_eq!(ids.len(), scopes.len());
}

#[test]
fn test_a_namespace_is_charged_to_one_account() {
    let (index, account) = index();
    index.namespace(&alice(), &stated(), account).unwrap();
    let other = index.pool().add_account(Quota { guaranteed: 0, limit: 8 }).unwrap();
    let error = index.namespace(&alice(), &stated(), other).unwrap_err();
    assert_eq!(error.to_string(), "namespace 0 is charged to account 0, not to account 1");
}

proptest! {
    #[test]
    fn test_the_encoding_is_injective(
        one in prop::array::uniform4(prop::option::of("[ab]{0,2}")),
        two in prop::array::uniform4(prop::option::of("[ab]{0,2}")),
    ) {
        let make = |[model, model_revision, tokenizer_revision, kv_scales]: [Option<String>; 4]| Fingerprint {
            model, model_revision, tokenizer_revision, kv_scales, ..Fingerprint::default()
        };
        let (one, two) = (make(one), make(two));
        prop_assert_eq!(one == two, one.to_bytes() == two.to_bytes());
    }
}
