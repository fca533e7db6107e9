//! Reading a config's fields: every complaint names the field and what was found there.

use crate::{Error, Result};
use serde_json::{Map, Value};

/// Largest count that is believed; anything above it is a broken file, and products of a few stay in range.
const MAX_COUNT: u64 = 1 << 31;

/// One JSON object of a config.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Where the object sits, for messages: empty, or `text_config.`.
    prefix: &'a str,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, prefix: &'a str) -> Self {
        Self { map, prefix }
    }

    /// The value, if the field is there and not null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// An error about a field.
    pub(super) fn fault(&self, name: &str, reason: impl std::fmt::Display) -> Error {
        Error::invalid(format!("config field '{}{name}': {reason}", self.prefix))
    }

    /// The first of `names` that is there, as a count of at least 1.
    pub(super) fn count(&self, names: &[&'static str]) -> Result<Option<u64>> {
        for &name in names {
            if let Some(value) = self.get(name) {
                return self.as_count(name, value, 1).map(Some);
            }
        }
        Ok(None)
    }

    /// Like `count`, but zero is a value too.
    pub(super) fn count_or_zero(&self, name: &'static str) -> Result<Option<u64>> {
        self.get(name).map(|value| self.as_count(name, value, 0)).transpose()
    }

    /// A count that must be there.
    pub(super) fn required(&self, names: &[&'static str], what: &str) -> Result<u64> {
        self.count(names)?.ok_or_else(|| {
            let others = names[1..].join(", ");
            let hint = if others.is_empty() { String::new() } else { format!(" (nor {others})") };
            self.fault(names[0], format!("is missing{hint}; it gives the {what}"))
        })
    }

    pub(super) fn as_count(&self, name: &str, value: &Value, least: u64) -> Result<u64> {
        // A whole number written as 32.0 is accepted: some exporters do that.
        let number = value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|x| x.fract() == 0.0 && (0.0..=MAX_COUNT as f64).contains(x))
                .map(|x| x as u64)
        });
        match number {
            Some(count) if (least..=MAX_COUNT).contains(&count) => Ok(count),
            _ => {
                Err(self
                    .fault(name, format!("is {value}, expected a whole number from {least} to {MAX_COUNT}")))
            }
        }
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.fault(name, format!("is {other}, expected true or false"))),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.fault(name, format!("is {other}, expected a string"))),
        }
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.fault(name, format!("is {other}, expected a list"))),
        }
    }

    pub(super) fn object(&self, name: &str) -> Option<&'a Map<String, Value>> {
        self.get(name).and_then(Value::as_object)
    }
}
