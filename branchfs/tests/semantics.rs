//! Each numbered promise of docs/semantics.md is quoted by a test, and no test quotes a number that does not exist.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The words of a text that are `S` and a number.
fn numbers(text: &str) -> BTreeSet<u32> {
    let words = text.split(|character: char| !character.is_ascii_alphanumeric());
    words.filter_map(|word| word.strip_prefix('S')?.parse().ok()).collect()
}

/// Which promises the tests quote: in the words of a file of tests on itself, or of a single test.
fn quoted() -> BTreeMap<u32, Vec<String>> {
    let mut quoted: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name == "semantics.rs" || path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("#[test]") || text.contains("#[path"), "{name} has no test");
        let comments = text.lines().map(str::trim_start).filter(|line| line.starts_with("//"));
        for number in comments.flat_map(numbers) {
            quoted.entry(number).or_default().push(name.clone());
        }
    }
    quoted
}

#[test]
fn every_promise_is_quoted_by_a_test_and_no_test_quotes_another() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/semantics.md");
    let text = fs::read_to_string(document).unwrap();
    let promised: BTreeSet<u32> = text
        .lines()
        .filter_map(|line| line.strip_prefix("- **S")?.split_once("**")?.0.parse().ok())
        .collect();
    assert_eq!(promised, (1..=14).collect(), "the promises of the document");
    let quoted = quoted();
    let missing: Vec<u32> =
        promised.iter().copied().filter(|number| !quoted.contains_key(number)).collect();
    assert!(missing.is_empty(), "no test quotes {missing:?}");
    let unknown: Vec<_> = quoted.iter().filter(|(number, _)| !promised.contains(number)).collect();
    assert!(unknown.is_empty(), "promises that are not made: {unknown:?}");
}
