//! Compares the tables of `docs/control.md` with the types of the protocol.

use std::collections::BTreeMap;

use serde::de::value::{Error, StrDeserializer};
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::*;
use branchfs_core::documents::{self, Section, code};

/// Fields and their types, in the words of the document.
type Fields = BTreeMap<String, String>;

/// Constructs a value of any type and describes the type.
struct Probe<'p> {
    /// The type, in the words of the document.
    found: &'p mut String,
    /// The fields, if the type is a struct.
    fields: &'p mut Fields,
    /// Makes every optional value absent and every list empty.
    is_empty: bool,
}

/// Constructs a value of a part of the type.
fn probe<'de, S: DeserializeSeed<'de>>(
    seed: S,
    is_empty: bool,
) -> Result<(S::Value, String), Error> {
    let mut found = String::new();
    let value =
        seed.deserialize(Probe { found: &mut found, fields: &mut Fields::new(), is_empty })?;
    Ok((value, found))
}

macro_rules! describe_as {
    ($($method:ident $visit:ident $value:expr, $words:literal;)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            $words.clone_into(self.found);
            visitor.$visit($value)
        })*
    };
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    describe_as! {
        deserialize_any visit_str "x", "branch";
        deserialize_bool visit_bool true, "boolean";
        deserialize_u32 visit_u32 1, "integer";
        deserialize_u64 visit_u64 1, "integer";
        deserialize_f64 visit_f64 0.5, "number";
        deserialize_str visit_str "x", "string";
        deserialize_string visit_str "x", "string";
        deserialize_bytes visit_str "x", "path";
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.is_empty {
            return visitor.visit_none();
        }
        let value =
            visitor.visit_some(Probe { found: self.found, fields: self.fields, is_empty: false });
        self.found.push_str(" or null");
        value
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        struct One<'p>(&'p mut String, bool);
        impl<'de> SeqAccess<'de> for One<'_> {
            type Error = Error;
            fn next_element_seed<S: DeserializeSeed<'de>>(
                &mut self,
                seed: S,
            ) -> Result<Option<S::Value>, Error> {
                if std::mem::replace(&mut self.1, true) {
                    return Ok(None);
                }
                let (value, found) = probe(seed, false)?;
                *self.0 = format!("list of {found}");
                Ok(Some(value))
            }
        }
        visitor.visit_seq(One(self.found, self.is_empty))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        "object".clone_into(self.found);
        visitor
            .visit_map(serde::de::value::MapDeserializer::new(std::iter::empty::<(&str, &str)>()))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        struct Each<'p> {
            names: std::slice::Iter<'static, &'static str>,
            current: &'static str,
            fields: &'p mut Fields,
            is_empty: bool,
        }
        impl<'de> MapAccess<'de> for Each<'_> {
            type Error = Error;
            fn next_key_seed<S: DeserializeSeed<'de>>(
                &mut self,
                seed: S,
            ) -> Result<Option<S::Value>, Error> {
                let Some(name) = self.names.next() else { return Ok(None) };
                self.current = name;
                let name: StrDeserializer<'_, Error> = name.into_deserializer();
                seed.deserialize(name).map(Some)
            }
            fn next_value_seed<S: DeserializeSeed<'de>>(
                &mut self,
                seed: S,
            ) -> Result<S::Value, Error> {
                let (value, found) = probe(seed, self.is_empty)?;
                self.fields.insert(self.current.to_owned(), found);
                Ok(value)
            }
        }
        name.clone_into(self.found);
        let names = fields.iter();
        visitor.visit_map(Each { names, current: "", fields: self.fields, is_empty: self.is_empty })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        *self.found = match variants {
            _ if name == "ErrorKind" => "kind".to_owned(),
            [others @ .., last] => {
                let others: Vec<_> = others.iter().map(|word| format!("\"{word}\"")).collect();
                format!("{} or \"{last}\"", others.join(", "))
            }
            [] => unreachable!("an enum has variants"),
        };
        visitor.visit_enum(variants[0].into_deserializer())
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i64 u8 u16 f32 char byte_buf unit unit_struct newtype_struct tuple tuple_struct
        identifier ignored_any
    }
}

/// Checks that the fields of a reply are sorted on the wire.
fn assert_sorted<T: Serialize + for<'de> Deserialize<'de>>() {
    let (mut name, mut fields) = (String::new(), Fields::new());
    let probe = Probe { found: &mut name, fields: &mut fields, is_empty: false };
    let json = serde_json::to_string(&T::deserialize(probe).unwrap()).unwrap();
    let positions: Vec<_> = fields.keys().map(|name| json.find(&format!("\"{name}\":"))).collect();
    assert!(positions.is_sorted(), "{name}: {json}");
}

/// The name and the fields of a struct.
fn describe<T: Serialize + for<'de> Deserialize<'de>>() -> (String, Fields) {
    let (mut name, mut fields) = (String::new(), Fields::new());
    let mut build = |is_empty| {
        let probe = Probe { found: &mut name, fields: &mut fields, is_empty };
        T::deserialize(probe).unwrap()
    };
    let empty = serde_json::to_value(build(true)).unwrap();
    build(false);
    for (field, words) in &mut fields {
        if empty.get(field).is_none() {
            *words = format!("{}, optional", words.trim_end_matches(" or null"));
        }
    }
    (name, fields)
}

/// The fields and types in a table of a section.
fn documented(section: &Section, table: &str) -> Fields {
    let rows = section.tables.get(table).map(Vec::as_slice).unwrap_or_default();
    rows.iter().map(|row| (code(&row[0]), row[1].clone())).collect()
}

fn sections() -> BTreeMap<String, Section> {
    documents::sections("control.md")
}

fn check_struct<T: Serialize + for<'de> Deserialize<'de>>() {
    let (name, fields) = describe::<T>();
    assert_sorted::<T>();
    assert_eq!(documented(&sections()[&name], "field"), fields, "{name}");
}

fn check_verb<V: Verb + Serialize + for<'de> Deserialize<'de>>() {
    let sections = sections();
    let quoted = format!("`{}`", V::NAME);
    let (_, section) = sections
        .iter()
        .find(|(heading, _)| heading.split(", ").any(|verb| verb == quoted))
        .unwrap_or_else(|| panic!("no section for {quoted}"));
    assert_eq!(documented(section, "field"), describe::<V>().1, "the request {quoted}");
    check_defaults::<V>(section);
    let (reply, fields) = describe::<V::Reply>();
    assert_sorted::<V::Reply>();
    match reply.as_str() {
        "object" => assert!(section.text.contains("The reply is an object"), "{quoted}"),
        _ if section.text.contains(&format!("[{reply}](#{})", reply.to_lowercase())) => {}
        _ => assert_eq!(documented(section, "reply field"), fields, "the reply to {quoted}"),
    }
    if fields.is_empty() && reply != "object" {
        assert!(section.text.contains("has no fields") || section.text.contains("have no fields"));
    }
}

/// Checks which fields a request must have, and the values of the others where they are absent.
fn check_defaults<V: Verb + Serialize + for<'de> Deserialize<'de>>(section: &Section) {
    let rows = section.tables.get("field").map(Vec::as_slice).unwrap_or_default();
    let is_required = |row: &&Vec<String>| row[2] == "required";
    let example = |row: &Vec<String>| if row[1] == "integer" { 1.into() } else { "x".into() };
    let required: Map<String, Value> =
        rows.iter().filter(is_required).map(|row| (code(&row[0]), example(row))).collect();
    let parse = |fields: &Map<String, Value>| V::deserialize(Value::Object(fields.clone()));
    let request = serde_json::to_value(parse(&required).unwrap()).unwrap();
    for row in rows.iter().filter(|row| !is_required(row)) {
        let default: Value = serde_json::from_str(&code(&row[2])).unwrap();
        assert_eq!(request[code(&row[0])], default, "{}: {}", V::NAME, row[0]);
    }
    for field in required.keys() {
        let mut others = required.clone();
        others.remove(field);
        assert!(parse(&others).is_err(), "{}: {field} is not required", V::NAME);
    }
}

#[test]
fn the_document_has_the_fields_of_every_verb() {
    check_verb::<Info>();
    check_verb::<Unmount>();
    check_verb::<Create>();
    check_verb::<Commit>();
    check_verb::<Rebase>();
    check_verb::<Abort>();
    check_verb::<List>();
    check_verb::<Diff>();
    check_verb::<Export>();
    check_verb::<Import>();
    check_verb::<Undo>();
    check_verb::<Redo>();
    check_verb::<History>();
    check_verb::<Show>();
    check_verb::<Prune>();
    check_verb::<Requests>();
    check_verb::<CloneMount>();
    let documented: usize = sections()
        .keys()
        .flat_map(|heading| heading.split(", "))
        .filter(|heading| heading.starts_with('`'))
        .count();
    assert_eq!(documented, Request::VERBS.len());
}

#[test]
fn the_document_has_the_fields_of_every_object() {
    check_struct::<ErrorReply>();
    check_struct::<Feature>();
    check_struct::<Branch>();
    check_struct::<Change>();
    check_struct::<ForgottenCommit>();
    check_struct::<Difference>();
    check_struct::<LineCounts>();
    check_struct::<ByteCounts>();
    check_struct::<HistoryEntry>();
}

#[test]
fn the_document_has_every_kind_of_error() {
    let sections = sections();
    let rows = &sections["Error kinds"].tables["kind"];
    // The message for an unknown word lists all of them.
    let unknown = serde_json::from_str::<ErrorKind>("\"x\"").unwrap_err().to_string();
    let kinds: Vec<String> = unknown.split('`').skip(3).step_by(2).map(str::to_owned).collect();
    assert_eq!(rows.iter().map(|row| code(&row[0])).collect::<Vec<_>>(), kinds);
}

#[test]
fn the_document_has_every_feature() {
    let section = &sections()["`info`"];
    let row = section.tables["reply field"].iter().find(|row| row[0] == "`features`").unwrap();
    let features: Vec<&str> = row[2].split('"').skip(1).step_by(2).collect();
    assert_eq!(features, FEATURES);
}
