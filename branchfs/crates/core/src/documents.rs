//! Reads tables and examples of `docs/`, for the tests that compare them with types.

#![expect(clippy::unwrap_used, reason = "only tests use it")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::de::value::Error;
use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The part of a document below one heading.
#[derive(Default)]
pub struct Section {
    /// The text, with its heading.
    pub text: String,
    /// The rows of each table, by the text of its first heading.
    pub tables: BTreeMap<String, Vec<Vec<String>>>,
    /// The lines of its `json` blocks.
    pub examples: Vec<String>,
}

/// The text of a cell without its code marks.
pub fn code(cell: &str) -> String {
    cell.trim_matches('`').to_owned()
}

/// The sections of a document, by their headings.
pub fn sections(document: &str) -> BTreeMap<String, Section> {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(document);
    let mut sections: BTreeMap<String, Section> = BTreeMap::new();
    let (mut heading, mut table, mut is_example) = (String::new(), String::new(), false);
    for line in fs::read_to_string(document).unwrap().lines() {
        if line.starts_with('#') {
            heading = line.trim_start_matches(['#', ' ']).to_owned();
        }
        let section = sections.entry(heading.clone()).or_default();
        section.text.push_str(line);
        section.text.push('\n');
        match line {
            "```json" => is_example = true,
            "```" => is_example = false,
            _ if is_example => section.examples.push(line.to_owned()),
            _ => {}
        }
        let Some(row) = line.strip_prefix("| ").and_then(|row| row.strip_suffix(" |")) else {
            if !line.starts_with('|') {
                table.clear();
            }
            continue;
        };
        let row: Vec<String> = row.split(" | ").map(str::to_owned).collect();
        if table.is_empty() {
            table.clone_from(&row[0]);
        } else {
            section.tables.entry(table.clone()).or_default().push(row);
        }
    }
    sections
}

/// The value at `pointer` (RFC 6901) of the first example below a heading of the format's document.
pub fn example(heading: &str, pointer: &str) -> Value {
    let value: Value = serde_json::from_str(&sections("format.md")[heading].examples[0]).unwrap();
    value.pointer(pointer).unwrap().clone()
}

/// Checks that a table of the format's document has the fields of a struct, with the types that `example` has.
pub fn assert_fields<T: for<'de> Deserialize<'de>>(heading: &str, table: &str, example: &Value) {
    let sections = sections("format.md");
    let rows = &sections[heading].tables[table];
    for row in rows {
        let (name, kind) = (code(&row[0]), row[1].trim_end_matches(", optional"));
        let value = &example[&name];
        let is_of_kind = match kind {
            "integer" => value.is_number(),
            "integer or null" => value.is_number() || value.is_null(),
            "boolean" => value.is_boolean(),
            "object" => value.is_object(),
            "list of integers" => {
                value.as_array().is_some_and(|all| all.iter().all(Value::is_number))
            }
            "string" | "hex" => value.is_string(),
            words => words.contains(&value.to_string()),
        };
        assert!(is_of_kind, "{heading}: {name} is {value}, not {kind}");
    }
    let mut documented: Vec<String> = rows.iter().map(|row| code(&row[0])).collect();
    let mut fields = fields_of::<T>();
    documented.sort();
    fields.sort_unstable();
    assert_eq!(documented, fields, "{heading}");
}

/// Checks that each example of a section equals what the type serializes to.
pub fn assert_examples<T: Serialize + for<'de> Deserialize<'de>>(heading: &str) {
    let examples = &sections("format.md")[heading].examples;
    assert!(!examples.is_empty(), "{heading}");
    for example in examples {
        let value: T = serde_json::from_str(example).unwrap();
        assert_eq!(serde_json::to_string(&value).unwrap(), *example, "{heading}");
    }
}

fn fields_of<T: for<'de> Deserialize<'de>>() -> Vec<&'static str> {
    struct Capture<'c>(&'c mut Vec<&'static str>);
    impl<'de> Deserializer<'de> for Capture<'_> {
        type Error = Error;
        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(serde::de::Error::custom("not a struct"))
        }
        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Error> {
            self.0.extend(fields);
            self.deserialize_any(visitor)
        }
        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut fields = Vec::new();
    let _ = T::deserialize(Capture(&mut fields)); // ends with an error by design
    fields
}
