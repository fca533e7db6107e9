//! Reading `layer_groups`: what the layers of each group see.

use crate::args::named_int;
use crate::error::invalid;
use crate::kinds::shown;
use kvpager_core::geometry::Span;
use pyo3::prelude::*;

/// Reads (span, window) pairs, as `KvGeometry.layer_groups` begins with; one full group for `None`.
pub(crate) fn read(groups: Option<&Bound<'_, PyAny>>) -> PyResult<Box<[Span]>> {
    let Some(groups) = groups else { return Ok(Box::new([Span::Full])) };
    let items: Vec<Bound<'_, PyAny>> = match groups.try_iter() {
        Ok(items) => items.collect::<PyResult<_>>()?,
        Err(_) => {
            return Err(invalid(format!(
                "layer_groups must be pairs of a span and a window, is {}",
                shown(groups)
            )));
        }
    };
    items.iter().enumerate().map(|(i, item)| read_span(i, item)).collect()
}

fn read_span(number: usize, item: &Bound<'_, PyAny>) -> PyResult<Span> {
    let wrong = || {
        invalid(format!(
            "layer_groups[{number}] is {}; it is one of ('full', None), ('sliding', tokens), ('chunked', tokens)",
            shown(item)
        ))
    };
    let (name, window): (String, Option<Bound<'_, PyAny>>) = item.extract().map_err(|_| wrong())?;
    let tokens =
        window.map(|window| named_int::<u64>(&window, &format!("layer_groups[{number}]"))).transpose()?;
    match (name.as_str(), tokens) {
        ("full", None) => Ok(Span::Full),
        ("sliding", Some(tokens)) => Ok(Span::Sliding(tokens)),
        ("chunked", Some(tokens)) => Ok(Span::Chunked(tokens)),
        _ => Err(wrong()),
    }
}
