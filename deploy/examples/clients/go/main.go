// Streams a chat that survives the restart of a replica, cancels one, and shows a refused field.
//
//	chat [-ca FILE] [-token-file FILE] [TARGET [MESSAGE]]
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "example.com/chat/gen/meshserve/v1"
)

func main() {
	ca := flag.String("ca", "", "PEM file of the authority that signed the server's certificate")
	tokenFile := flag.String("token-file", "", "file that contains the token")
	flag.Parse()
	target, content := "dns:///127.0.0.1:50051", "Who art thou?"
	if flag.NArg() > 0 {
		target = flag.Arg(0)
	}
	if flag.NArg() > 1 {
		content = flag.Arg(1)
	}
	connection, err := connect(target, *ca, *tokenFile)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewInferenceServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	request := &pb.ChatRequest{
		Messages: []*pb.ChatMessage{{Role: "user", Content: content}},
		Sampling: &pb.SamplingParams{MaxTokens: proto.Uint32(200)},
	}

	fmt.Println("# A chat. Restart a replica meanwhile: it goes on where it was.")
	err = resume(ctx, client, request, 20, func(response *pb.GenerateResponse) {
		fmt.Print(response.GetText())
		if finish := response.GetFinish(); finish != nil {
			fmt.Printf("\n[%s]\n", finish.GetReason())
		}
	})
	if err != nil {
		log.Fatal(err)
	}

	fmt.Println("# Another one, cancelled after its first message: the server frees its pages at once.")
	cancelled, stop := context.WithCancel(ctx)
	err = resume(cancelled, client, request, 20, func(response *pb.GenerateResponse) {
		if cancelled.Err() == nil {
			fmt.Printf("%s...\n", response.GetText())
		}
		stop()
	})
	if err != nil && cancelled.Err() == nil {
		log.Fatal(err)
	}

	fmt.Println("# A refused one.")
	request.Sampling.Temperature = proto.Float64(-1)
	err = resume(ctx, client, request, 20, func(*pb.GenerateResponse) {})
	field, _ := detailsOf(err)
	fmt.Printf("field %s: %s\n", field, status.Convert(err).Message())
}
