//! Geometry and budget: promises that need no model file. The released models are in `tests/geometry`.

use kvpager_core::geometry::{
    Budget, BudgetInput, GeometryOptions, KvDtype, KvGeometry, KvScales, Origin, Span,
};

fn geometry(config: &str, options: GeometryOptions) -> kvpager_core::Result<KvGeometry> {
    KvGeometry::from_config_json(config, options)
}

/// Two bytes a token, so that the numbers of a scenario can be read off.
fn tiny() -> KvGeometry {
    let config = r#"{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 1}"#;
    let options = GeometryOptions { kv_dtype: KvDtype::Fp8, ..GeometryOptions::default() };
    geometry(config, options).expect("a valid config")
}

fn tiny_input() -> BudgetInput {
    BudgetInput {
        device_free: Some(120),
        device_share: 0.9,
        weights: Some(32),
        activations: Some(8),
        workspace: Some(0),
        communication: Some(0),
        runtime: Some(0),
        graphs: Some(0),
        safety_margin: Some(4),
        block_size: 1,
        ..BudgetInput::new(160)
    }
}

#[test]
fn budget_starts_from_free_memory_not_from_the_total() {
    let budget = Budget::new(&tiny(), &tiny_input()).expect("room for blocks");
    assert_eq!((budget.available, budget.num_blocks), (120, 38));
    let total: u64 = budget.parts.iter().map(|part| part.bytes).sum();
    assert_eq!(total, 160, "the parts cover the device");
    assert_eq!(budget.parts[0].origin, Origin::Given);
}

#[test]
fn budget_without_room_says_what_fits_and_what_helps() {
    let input = BudgetInput {
        device_free: None,
        device_share: 1.0,
        weights: Some(160 - 8 - 4 - 3 * 8),
        block_size: 4,
        max_model_tokens: Some(20),
        ..tiny_input()
    };
    let text = Budget::new(&tiny(), &input).expect_err("three blocks, five needed").to_string();
    for part in ["3 blocks", "needs 5", "one block is 8 bytes", "has 12 tokens", "--max-model-tokens"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    let input = BudgetInput { weights: Some(500), max_model_tokens: None, ..input };
    let text = Budget::new(&tiny(), &input).expect_err("weights alone do not fit").to_string();
    for part in ["0 blocks", "weights 500", "has 0 tokens"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// Llama-3.1-8B with 8 stages, by hand: a layer has 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 parameters
/// and a table 128256 * 4096; the first stage has four layers and a table.
#[test]
fn weights_under_pipeline_parallel_are_the_heaviest_stage_with_its_table() {
    let weights = |tied: bool, tp, pp| {
        let config = format!(
            r#"{{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
                "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": {tied}}}"#
        );
        let options =
            GeometryOptions { tensor_parallel: tp, pipeline_parallel: pp, ..GeometryOptions::default() };
        let model = geometry(&config, options).expect("spreads");
        let input = BudgetInput { max_model_tokens: Some(1024), ..BudgetInput::new(80 << 30) };
        let budget = Budget::new(&model, &input).expect("fits");
        (budget.bytes("weights"), model.weights_on_device(1_000_000))
    };
    let (layer, table) = (218_103_808_u64, 128_256 * 4096_u64);
    let bytes = |layers: u64, tables: u64| 2 * (layers * layer + tables * table);
    let share = |of: u64, all: u64| (of * 1_000_000).div_ceil(all);
    assert_eq!(bytes(4, 1), 2_795_503_616);
    for (tied, tables) in [(false, 2), (true, 1)] {
        let all = bytes(32, tables);
        assert_eq!(weights(tied, 1, 1), (all, 1_000_000));
        assert_eq!(weights(tied, 2, 1), (all / 2, 500_000));
        // Both ends have a table, tied or not.
        assert_eq!(weights(tied, 1, 8), (bytes(4, 1), share(bytes(4, 1), all)));
        assert_eq!(weights(tied, 2, 8).0, bytes(4, 1) / 2);
        // Stages of 7, 7, 6, 6 and 6 layers: the first has the longest and a table.
        assert_eq!(weights(tied, 1, 5).0, bytes(7, 1));
        assert_eq!(weights(tied, 1, 32).0, bytes(1, 1));
    }
}

#[test]
fn kv_heads_are_replicated_when_ranks_outnumber_them() {
    let config = r#"{"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 8,
                     "hidden_size": 128}"#;
    let spread = |tp, pp| {
        let options =
            GeometryOptions { tensor_parallel: tp, pipeline_parallel: pp, ..GeometryOptions::default() };
        geometry(config, options)
    };
    let bytes = [1, 2, 4, 8, 16].map(|tp| spread(tp, 1).expect("spreads").bytes_per_token());
    assert_eq!(bytes, [512, 256, 128, 128, 128]);
    assert_eq!(spread(16, 1).expect("spreads").bytes_per_token_all_devices(), 4 * 512);
    assert_eq!(spread(1, 3).expect("spreads").layers_per_device(), 2);
    assert!(spread(3, 1).is_err() && spread(1, 5).is_err());
}

#[test]
fn quantised_caches_carry_their_scales() {
    let config = r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
                     "hidden_size": 256}"#;
    let bytes = |kv_dtype: KvDtype, scales| {
        let options = GeometryOptions { kv_dtype, scales, ..GeometryOptions::default() };
        geometry(config, options).expect("valid").bytes_per_token()
    };
    assert_eq!(bytes(KvDtype::Fp8, KvScales::PerTensor), 2 * 2 * 2 * 64);
    assert_eq!(bytes(KvDtype::Int8, KvScales::PerTokenHead), 2 * 2 * 2 * (64 + 4));
    assert_eq!(bytes(KvDtype::Float16, KvScales::PerTensor), 2 * 2 * 2 * 128);
}

/// 62 layers, every sixth full, window 1024: the split must not let the full group grow.
#[test]
fn groups_have_equal_blocks_and_report_their_padding() {
    let config = r#"{"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376, "sliding_window": 1024,
        "sliding_window_pattern": 6, "max_position_embeddings": 131072}"#;
    let geometry = geometry(config, GeometryOptions::default()).expect("valid");
    assert_eq!(geometry.bytes_per_token(), 496 << 10);
    assert_eq!(geometry.bytes_per_token_beyond_window(), 80 << 10);
    let mut layers = 0;
    for group in geometry.groups() {
        let block = group.bytes_per_token + group.padding_bytes_per_token;
        assert_eq!(block, geometry.block_bytes_per_token());
        layers += group.layers.len();
    }
    assert_eq!(layers, 62);
    let full: Vec<_> = geometry.groups().iter().filter(|group| group.span == Span::Full).collect();
    assert_eq!((full.len(), full[0].padding_bytes_per_token), (1, 0));
    // A long request pays for the full group, and for a saturated window.
    assert_eq!(geometry.bytes_for_length(131_072), (80 << 10) * 131_072 + (416 << 10) * 1024);
    let blocks = geometry.blocks_for_length(131_072, 16, 1);
    assert_eq!(blocks, 8192 + (geometry.groups().len() as u64 - 1) * 65);
    // A plan for the longest request fits, and one token more is refused, though tables grow with it.
    let input = BudgetInput { max_batch_tokens: 64, weights: Some(1 << 30), ..BudgetInput::new(12 << 30) };
    let longest = Budget::new(&geometry, &input).expect("room").longest_request;
    let with =
        |tokens| Budget::new(&geometry, &BudgetInput { max_model_tokens: Some(tokens), ..input.clone() });
    assert_eq!(with(longest).expect("the longest fits").longest_request, longest);
    let text = with(longest + 1).expect_err("one more does not").to_string();
    assert!(text.contains(&format!("has {longest} tokens")), "{text}");
}
