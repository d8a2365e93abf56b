//! `[log]` and `[traces]`.

use super::*;

#[test]
fn what_is_told_of_requests_is_checked() {
    refuses(&[
        ("[log]\nlevel = \"loud\"", "2:9: log.level: must be \"off\", \"error\", \"warn\""),
        ("[log]\nlevel = \"info,a b=debug\"", "2:9: log.level: must be"),
        ("[log]\nlevel = \"\"", "2:9: log.level: must be"),
        ("[log]\nformat = \"xml\"", "2:10: log.format: must be \"auto\", \"text\" or \"json\""),
        ("[log]\nsample = 1.5", "2:10: log.sample: must be from 0.0 to 1.0"),
        ("[log]\nsample = nan", "2:10: log.sample: must be from 0.0 to 1.0"),
        ("[log]\nquery = true", "2:1: log.query: unknown key"),
        ("[traces]\nsample = 1.0", "1:1: traces.endpoint: must be given"),
        ("[traces]\nendpoint = \"collector:4318\"", "2:12: traces.endpoint: must be"),
        (
            "[traces]\nendpoint = \"http://me:s3cret@c:4318\"",
            "2:12: traces.endpoint: must have no user and no password",
        ),
        (
            "[traces]\nendpoint = \"http://c:4318\"\nsample = -0.1",
            "3:10: traces.sample: must be from 0.0 to 1.0",
        ),
        (
            "[traces]\nendpoint = \"http://c:4318\"\nservice = \"\"",
            "3:11: traces.service: must be 1 to 128 bytes",
        ),
        (
            "[traces]\nendpoint = \"http://c:4318\"\nheaders = { \"a b\" = \"1\" }",
            "3:13: traces.headers.a b: must be",
        ),
    ]);
}

#[test]
fn every_key_of_it_is_read() {
    let text = "[log]\nlevel = \"warn,tidegate::leases=debug\"\nformat = \"text\"\nrequests = true\nsample = 0.25\n\
        [traces]\nendpoint = \"https://c/base\"\nsample = 0.5\nservice = \"gate\"\nheaders = { x-key = \"s3cret\" }\n";
    let config = parse(&format!("{text}{REST}")).unwrap();
    let expected = Log {
        level: "warn,tidegate::leases=debug".to_owned(),
        format: LogFormat::Text,
        requests: true,
        sample: 0.25,
    };
    assert_eq!(config.log, expected);
    let shown = format!("{config:?}");
    let traces = config.traces.unwrap();
    assert_eq!((traces.endpoint.to_string().as_str(), traces.sample), ("https://c/base", 0.5));
    assert_eq!(
        (traces.service.as_str(), &traces.headers[0].1),
        ("gate", &"s3cret".parse().unwrap())
    );
    assert!(!shown.contains("s3cret"));
    let plain = parse(REST).unwrap();
    assert_eq!((plain.log, plain.traces), (Log::default(), None));
}
